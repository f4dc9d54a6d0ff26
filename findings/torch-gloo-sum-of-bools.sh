#!/usr/bin/env bash
# PyTorch 2.13.0: gloo sums bool tensors as bytes, so that the sum of 256 times True is False.
#
# Seen with torch 2.13.0 (CPU), numpy 2.4.6, Python 3.11, two processes: all_reduce(), whose default is SUM, takes
# bool tensors with the backend gloo. The result has bytes of 2, which torch reads as True, and a program that
# asks "has any rank overflowed?" works until the count is a multiple of 256: on 256 ranks where all say True, or
# here after eight sums in a row. ReduceOp.MAX and BOR give True.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/any.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist

assert torch.__version__.startswith("2.13.0"), torch.__version__


def count(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    flag = torch.tensor([True])
    sums = []
    for _ in range(8):
        dist.all_reduce(flag)
        sums.append((bool(flag), int(flag.view(torch.uint8))))
    largest = torch.tensor([True])
    for _ in range(8):
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    if rank == 0:
        print(f"sums of True, and their bytes: {sums}; maximum: {bool(largest)}")
    assert sums[0] == (True, 2) and sums[-1] == (False, 0), "changed: sums"
    assert bool(largest), "changed: maximum"
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(count, (sys.argv[1],), 2)
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/any.py" "$folder"
