#!/usr/bin/env bash
# PyTorch 2.13.0: item() and float() of a reduced DTensor give each rank's part, and adding 0 gives the whole.
#
# Seen with torch 2.13.0 (CPU), numpy 2.3.5, Python 3.11, 3 processes: the sum of a DTensor of 1 to 5 in shards is
# "partial": reduced when something needs it. item() and float() are not such a thing: they return 3, 7 and
# 5 on the three ranks. (x + 0).item() returns 15 on all, while (x * 1).item() does not. maximum, norm and
# losses behave like the sum. mean is whole if the shards are uneven, and a part if they are even. So logged
# losses and norms, and decisions of `if loss.item() > limit`, differ between ranks without a message.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat >"$folder/script.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

assert torch.__version__.startswith("2.13.0"), torch.__version__
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (3,))
five, six = (distribute_tensor(torch.arange(1.0, n), mesh, [Shard(0)]) for n in (6, 7))

for what, value, expected in (
    ("sum().item()", five.sum().item(), [3, 7, 5]),
    ("float(sum())", float(five.sum()), [3, 7, 5]),
    ("(sum() * 1).item()", (five.sum() * 1).item(), [3, 7, 5]),
    ("(sum() + 0).item()", (five.sum() + 0).item(), [15, 15, 15]),
    ("sum().full_tensor().item()", five.sum().full_tensor().item(), [15, 15, 15]),
    ("max().item()", five.max().item(), [2, 4, 5]),
    ("mean().item() of five numbers", five.mean().item(), [3, 3, 3]),
    ("mean().item() of six numbers", six.mean().item(), [1.5, 3.5, 5.5]),
):
    values = [torch.zeros(()) for _ in range(3)]
    dist.all_gather(values, torch.tensor(float(value)))
    values = [each.item() for each in values]
    if dist.get_rank() == 0:
        print(f"{what} on the three ranks: {values}")
    assert values == expected, f"changed: {what}"
dist.barrier()
dist.destroy_process_group()
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 3 "$folder/script.py"
