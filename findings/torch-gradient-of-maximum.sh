#!/usr/bin/env bash
# PyTorch 2.13.0: the gradient of the differentiable all_reduce is wrong for MAX, MIN and PRODUCT.
#
# Seen with torch 2.13.0 (CPU), numpy 2.3.5, Python 3.11, 3 processes: torch.distributed.nn.functional.all_reduce
# takes every operation, and its backward pass reduces the gradients by the same one. Of x = 1, 5, 3 on
# three ranks the gradient of the maximum is 1 on each rank, not 1 on the rank that has it; that of the
# product is the product of the incoming gradients, 1, and not 15, 3 and 5. For SUM and AVG it is right.
# A loss over a maximum or product of all ranks trains on these. torch.distributed._functional_collectives,
# which the deprecated function names as its successor, refuses all but sums in the backward pass.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat >"$folder/script.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_reduce

assert torch.__version__.startswith("2.13.0"), torch.__version__
dist.init_process_group("gloo")
rank, VALUES = dist.get_rank(), [1.0, 5.0, 3.0]

for name, value, right, seen in (
    ("SUM", 9.0, [3.0] * 3, [3.0] * 3),
    ("AVG", 3.0, [1.0] * 3, [1.0] * 3),
    ("MAX", 5.0, [0.0, 3.0, 0.0], [1.0] * 3),
    ("MIN", 1.0, [3.0, 0.0, 0.0], [1.0] * 3),
    ("PRODUCT", 15.0, [45.0, 9.0, 15.0], [1.0] * 3),
):
    x = torch.tensor(VALUES[rank], requires_grad=True)
    result = all_reduce(x.clone(), op=getattr(dist.ReduceOp, name))
    # The loss is the sum of the results of all ranks, as for a SUM: each rank adds its own to it.
    result.backward()
    gradients = [torch.zeros(()) for _ in VALUES]
    dist.all_gather(gradients, x.grad)
    gradients = [gradient.item() for gradient in gradients]
    if rank == 0:
        print(f"{name} of {VALUES}: {result.item()}, gradients {gradients}, right are {right}")
    assert result.item() == value and gradients == seen, f"changed: {name}"
dist.barrier()
dist.destroy_process_group()
PYTHON
OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore "$folder/venv/bin/torchrun" --standalone --nproc-per-node 3 "$folder/script.py"
