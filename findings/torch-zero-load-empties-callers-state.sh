#!/usr/bin/env bash
# PyTorch 2.13.0: ZeroRedundancyOptimizer.load_state_dict removes other ranks' state from the caller's dictionary.
#
# Seen with torch 2.13.0 (CPU, gloo), numpy 2.3.5, Python 3.11, 2 processes: after the call, the state of each
# parameter that another rank updates is None in the dictionary that was passed, so that each rank holds another
# half, and nobody says so. A checkpoint that is written from it later holds half of the state. Loading into
# torch.optim.Adam leaves the dictionary as it is.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat >"$folder/script.py" <<'PYTHON'
import copy

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

assert torch.__version__.startswith("2.13.0"), torch.__version__
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))


def lost(state):
    return [index for index, values in state["state"].items() if values is None]


def trained(optimizer):
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return optimizer


sharded = trained(ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1))
sharded.consolidate_state_dict(to=0)
box = [sharded.state_dict() if rank == 0 else None]
dist.broadcast_object_list(box, 0)
state = box[0]
assert lost(state) == [], state
ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1).load_state_dict(state)

plain = trained(torch.optim.Adam(model.parameters(), lr=0.1))
kept = copy.deepcopy(plain.state_dict())
torch.optim.Adam(model.parameters(), lr=0.1).load_state_dict(kept)
print(f"rank {rank}: parameters without state after loading: {lost(state)}; with Adam itself: {lost(kept)}", flush=True)
assert lost(state) == [[2, 3], [0, 1]][rank], "changed: the dictionary that was loaded"
assert lost(kept) == [], "changed: torch.optim"
dist.barrier()
dist.destroy_process_group()
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/script.py" </dev/null
