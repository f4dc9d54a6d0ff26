#!/usr/bin/env bash
# mpi4py 4.1.2: allreduce of numpy's booleans does not count ranks; of Python's it does.
#
# Seen with mpi4py 4.1.2, MPICH 5.0.2, numpy 2.4.6, Python 3.11, 3 ranks: allreduce adds objects with their own "+", and two
# of numpy's booleans add up to True. What a test of arrays returns is one of them, as `(error < limit).all()` or
# `np.isnan(loss)`: its sum is True on any number of ranks, equal to 1, and `== comm.size` is never true. A
# loop that ends when all ranks have converged does not end; a log of ranks with NaN says 1 of 3. On one rank it
# is right. Python's True counts, as does bool() of numpy's. It is the same with scan, and with arrays of
# booleans, which integers count. Nothing is said.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/script.py" <<'PYTHON'
import mpi4py
import numpy as np
from mpi4py import MPI

assert mpi4py.__version__ == "4.1.2", mpi4py.__version__
world = MPI.COMM_WORLD
losses = np.full(4, np.nan)
has_nan = np.isnan(losses).any()  # on all ranks

cases = {
    "Python's True": (world.allreduce(bool(has_nan)), world.size),
    "numpy's True": (world.allreduce(has_nan), 1),
    "numpy's True on rank 0 alone": (world.allreduce(has_nan if world.rank == 0 else ~has_nan), 1),
    "an array of numpy's True": (world.allreduce(np.isnan(losses)).tolist(), [True] * 4),
    "the same, as integers": (world.allreduce(np.isnan(losses).astype(int)).tolist(), [world.size] * 4),
    "numpy's True, scanned": (world.scan(has_nan), 1),
}
for what, (seen, expected) in cases.items():
    if world.rank == 0:
        print(f"{world.size} ranks, sum of {what}: {seen!r}", flush=True)
    assert seen == expected, f"changed: {what}"
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet mpich==5.0.2 mpi4py==4.1.2 numpy==2.4.6
for ranks in 1 3; do
    PATH="$folder/venv/bin:$PATH" mpiexec -n "$ranks" "$folder/venv/bin/python" -W error "$folder/script.py"
done
