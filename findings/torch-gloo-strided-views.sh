#!/usr/bin/env bash
# PyTorch 2.13.0: gloo's all_reduce and broadcast take a column for the memory that begins there.
#
# Seen with torch 2.13.0 (CPU), numpy 2.3.5, Python 3.11, 2 processes: all_reduce of column 0 of a 4 x 2 matrix
# sums the first two entries of both columns, as these are the first four numbers in memory. Half of the
# column is not summed, half of the other column is, and nothing is said. broadcast does the same, and
# the imaginary part of a complex tensor is such a view, too. If the ranks' layouts differ, as with a
# transposed matrix on one of them, entries of different places are added.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat >"$folder/script.py" <<'PYTHON'
import torch
import torch.distributed as dist

assert torch.__version__.startswith("2.13.0"), torch.__version__
dist.init_process_group("gloo")
rank = dist.get_rank()


def report(what, tensor, expected):
    if rank == 0:
        print(f"{what}: {tensor.tolist()}")
        assert tensor.tolist() == expected, f"changed: {what}"


matrix = torch.ones(4, 2)
dist.all_reduce(matrix[:, 0])
report("all_reduce of column 0 of ones", matrix, [[2, 2], [2, 2], [1, 1], [1, 1]])

matrix = torch.full((4, 2), float(rank))
dist.broadcast(matrix[:, 0], src=1)
report("broadcast of column 0, from ones to zeros", matrix, [[1, 1], [1, 1], [0, 0], [0, 0]])

numbers = torch.tensor([1 + 10j, 2 + 20j, 3 + 30j])
dist.all_reduce(numbers.imag)
report("all_reduce of an imaginary part", torch.view_as_real(numbers), [[1, 20], [4, 40], [3, 30]])

matrix = torch.arange(6.0).reshape(2, 3)
if rank == 1:
    matrix = matrix.t().contiguous().t()
dist.all_reduce(matrix)
report("all_reduce of [[0, 1, 2], [3, 4, 5]], transposed in one rank's memory", matrix, [[0, 4, 3], [7, 6, 10]])
dist.barrier()
dist.destroy_process_group()
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/script.py"
