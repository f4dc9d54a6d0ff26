#!/usr/bin/env bash
# PyTorch 2.13.0: mean losses of a DTensor that cannot be divided evenly are means of the ranks' means.
#
# Seen with torch 2.13.0 (CPU), numpy 2.3.5, Python 3.11, 3 processes: a DTensor of 1 to 5 in shards of 2, 2 and 1
# has the mean 3, as it should. mse_loss of it against its double is 13.33 instead of 11, because each
# rank's mean counts as much as the others, whatever its rows. smooth_l1_loss, huber_loss,
# soft_margin_loss and both binary cross entropies do the same; l1_loss and poisson_nll_loss are
# right. So a last batch that does not divide, or a weight penalty written as a loss, is weighted
# wrongly, and its gradient with it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat >"$folder/script.py" <<'PYTHON'
import math

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.nn import functional

assert torch.__version__.startswith("2.13.0"), torch.__version__
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (3,))
whole = torch.arange(1.0, 6.0)

WRONG = ["mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss"]
WRONG += ["binary_cross_entropy", "binary_cross_entropy_with_logits"]
for name in [*WRONG, "l1_loss", "poisson_nll_loss"]:
    loss, scale = getattr(functional, name), 0.1 if name.startswith("binary") else 1.0
    right = loss(whole * scale, whole * scale * 2).item()
    sharded = distribute_tensor(whole * scale, mesh, [Shard(0)])
    seen = loss(sharded, sharded * 2).full_tensor().item()
    parts = [part * scale for part in whole.chunk(3)]
    of_means = sum(loss(part, part * 2).item() for part in parts) / 3
    if dist.get_rank() == 0:
        print(f"{name}: {seen:.5f}, right is {right:.5f}, the mean of the three means is {of_means:.5f}")
    assert math.isclose(seen, of_means if name in WRONG else right, rel_tol=1e-5), f"changed: {name}"
    assert not math.isclose(of_means, right, rel_tol=1e-3), name
assert distribute_tensor(whole, mesh, [Shard(0)]).mean().full_tensor() == 3, "changed: mean"
dist.barrier()
dist.destroy_process_group()
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 3 "$folder/script.py"
