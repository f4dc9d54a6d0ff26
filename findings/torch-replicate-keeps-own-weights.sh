#!/usr/bin/env bash
# PyTorch 2.13.0: of its two functions `replicate`, one leaves every rank its own initial weights.
#
# Seen with Python 3.11, gloo, 2 CPU processes that build a model after different seeds and train it for 3 steps.
# `torch.distributed._composable.replicate` gives all ranks the weights of rank 0 in the first forward
# pass, like DistributedDataParallel. `torch.distributed._composable.replicate_with_fsdp.replicate`, made
# of FSDP2, averages the gradients alike, but never compares or sends the weights: each rank trains a
# different model, with equal gradients in every step, and saves a different one. Nothing is said.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat >"$folder/trains.py" <<'PYTHON'
import importlib
import sys

import torch
import torch.distributed as dist


def equal(tensors):
    """Whether both ranks have the same numbers."""
    mine = torch.cat([getattr(t, "to_local", lambda t=t: t)().detach().flatten() for t in tensors])
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine)
    return torch.equal(*both)


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
importlib.import_module("torch.distributed._composable." + sys.argv[1]).replicate(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
same = equal([p.grad for p in model.parameters()]), equal(model.parameters())
if rank == 0:
    print(f"{sys.argv[1]}: after training, gradients and weights are equal: {same}", flush=True)
dist.destroy_process_group()
PYTHON
while IFS=: read -r module expected; do
    "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/trains.py" "$module" </dev/null >"$folder/output" 2>&1
    grep -F "$module: after training, gradients and weights are equal: $expected" "$folder/output" || { echo "changed:"; cat "$folder/output"; exit 1; }
done <<'CASES'
replicate:(True, True)
replicate_with_fsdp:(True, False)
CASES
