#!/usr/bin/env bash
# Accelerate 1.15.0: split_between_processes overwrites a dictionary that it is given; lists stay as they are.
#
# Seen with accelerate 1.15.0, torch 2.13.0 (CPU), numpy 2.3.5, Python 3.11, 2 processes: inside the context the
# caller's own dictionary, not a copy, holds this process's share, and it still does afterwards. So in a loop
# over epochs the second pass splits the share of the first: of four prompts each process evaluates two,
# then one, then one or none, and nobody says so. A list or a tensor is split anew each time.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet accelerate==1.15.0 torch==2.13.0 numpy==2.3.5
cat >"$folder/script.py" <<'PYTHON'
import accelerate
import torch.distributed as dist
from accelerate import Accelerator

assert accelerate.__version__ == "1.15.0", accelerate.__version__
accelerator = Accelerator(cpu=True)
rank = accelerator.process_index

prompts, labels = {"prompt": ["a", "b", "c", "d"]}, ["a", "b", "c", "d"]
shares, shares_of_list = [], []
for _ in range(3):
    with accelerator.split_between_processes(prompts) as share:
        shares.append(list(share["prompt"]))
    with accelerator.split_between_processes(labels) as share:
        shares_of_list.append(list(share))
print(f"process {rank}, three passes: shares of a dictionary {shares}, of a list {shares_of_list}", flush=True)
assert shares == [[["a", "b"], ["a"], ["a"]], [["c", "d"], ["d"], []]][rank], "changed: a dictionary"
assert shares_of_list == [[["a", "b"]] * 3, [["c", "d"]] * 3][rank], "changed: a list"
assert prompts["prompt"] == shares[-1] and labels == ["a", "b", "c", "d"], "changed: what the caller holds"
dist.barrier()
dist.destroy_process_group()
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/script.py"
