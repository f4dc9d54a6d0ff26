#!/usr/bin/env bash
# PyTorch 2.13.0: torch.distributed.checkpoint keeps the first rank's tensors and the last rank's numbers.
#
# Seen with torch 2.13.0 (CPU), numpy 2.3.5, Python 3.11, 2 processes: each rank saves its own random state (a tensor),
# its number of samples (an int) and its name (a string) under the same names. load() gives all ranks the
# tensor of rank 0 together with the number and the string of rank 1: a state that no rank ever had. Nothing
# is said, neither when saving nor when loading; a name that only one rank has is kept.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat >"$folder/script.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

assert torch.__version__.startswith("2.13.0"), torch.__version__
dist.init_process_group("gloo")
rank = dist.get_rank()
own = {"random": torch.tensor([rank]), "samples": rank, "name": f"rank {rank}", f"only {rank}": torch.tensor([rank])}
dcp.save(own, checkpoint_id=sys.argv[1])
state = {"random": torch.tensor([-1]), "samples": -1, "name": ""}
state |= {f"only {other}": torch.tensor([-1]) for other in range(2)}
dcp.load(state, checkpoint_id=sys.argv[1])
if rank == 0:
    print(f"saved by rank 0: {own}\nloaded: {state}")
assert (state["random"].item(), state["samples"], state["name"]) == (0, 1, "rank 1"), "changed: the same names"
assert [state[f"only {other}"].item() for other in range(2)] == [0, 1], "changed: names of one rank"
dist.barrier()
dist.destroy_process_group()
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/script.py" "$folder/checkpoint"
