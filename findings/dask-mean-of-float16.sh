#!/usr/bin/env bash
# dask 2026.8.0: the mean of float16 is inf, or NaN, where NumPy has the right number.
#
# Seen with dask 2026.8.0, numpy 2.4.6, Python 3.11: NumPy takes the mean of float16 in float32; dask.array adds in float16,
# which ends at 65,504, and divides then. The mean of 1,000 numbers of 100 is inf; that of 100,000 ones is NaN, as their
# count is inf too. What is stored in half precision to save space, such as embeddings or images, is normalized by these. At
# most NumPy warns of an overflow in a worker. With dtype="float32" all are right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet dask==2026.8.0 numpy==2.4.6
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import dask
import dask.array
import numpy as np

assert dask.__version__ == "2026.8.0", dask.__version__

for size, number in ((100, 100), (1000, 100), (100_000, 1)):
    array = np.full(size, number, "float16")
    lazy = dask.array.from_array(array, chunks=500)
    right, seen = float(array.mean()), float(lazy.mean().compute())
    print(f"mean of {size} times {number}: NumPy {right}, dask {seen}")
    assert right == number, "NumPy"
    assert str(seen) == {100: "100.0", 1000: "inf", 100_000: "nan"}[size], "changed: mean"
    assert lazy.mean(dtype="float32").compute() == number, "changed: float32"
PYTHON
