#!/usr/bin/env bash
# Lightning 2.6.6: Fabric.all_reduce cuts means of integers, and sums Python integers in 32 bits.
#
# Seen with lightning 2.6.6, torch 2.13.0 (CPU), numpy 2.3.5, Python 3.11, 2 processes: all_reduce averages if it is
# given no reduce_op. The mean of the integer tensors 1 and 2 is 1, and so is that of the numbers 1 and
# 2; of True and False it is 0. Python integers travel as int32: the sum of 2**30 over two ranks is
# -2147483648, without a warning, and 2**31 raises RuntimeError. Accuracies as counts of hits, and
# numbers of tokens, are such numbers. accelerator.reduce of Accelerate refuses a mean of integers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet lightning==2.6.6 torch==2.13.0 numpy==2.3.5
cat >"$folder/script.py" <<'PYTHON'
import lightning
import torch
import torch.distributed as dist
from lightning.fabric import Fabric

assert lightning.__version__ == "2.6.6", lightning.__version__
fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
rank = fabric.global_rank

results = {
    "mean of tensor(1) and tensor(2)": (fabric.all_reduce(torch.tensor(1 + rank)), 1),
    "mean of tensor(1.) and tensor(2.)": (fabric.all_reduce(torch.tensor(1.0 + rank)), 1.5),
    "mean of 1 and 2": (fabric.all_reduce(1 + rank), 1),
    "mean of True and False": (fabric.all_reduce(rank == 0), 0),
    "sum of 2**30 and 2**30": (fabric.all_reduce(2**30, reduce_op="sum"), -(2**31)),
    "sum of tensor(2**30) twice": (fabric.all_reduce(torch.tensor(2**30), reduce_op="sum"), 2**31),
}
for what, (seen, expected) in results.items():
    if rank == 0:
        print(f"{what}: {seen}")
    assert seen == expected, f"changed: {what}"
try:
    fabric.all_reduce(2**31, reduce_op="sum")
except RuntimeError as error:
    if rank == 0:
        print(f"sum of 2**31 and 2**31: RuntimeError: {error}")
else:
    raise SystemExit("changed: 2**31 is taken")
dist.barrier()
dist.destroy_process_group()
PYTHON
OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/script.py"
