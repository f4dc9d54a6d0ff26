#!/usr/bin/env bash
# dask 2026.8.0: norms of integers, and averages with integers as weights, wrap around.
#
# Seen with dask 2026.8.0, numpy 2.4.6, Python 3.11: numpy.linalg.norm and numpy.average make float64 of integers first.
# dask.array squares, and multiplies by the weights, in the type of the array: in int32 the norm of three times 100,000 is
# 65,040 instead of 173,205; in uint8, as of images, that of three times 100 is 6.9, and their average, with the weights
# 3, 2, 3, is 36, in int8 4. Distances, normalized vectors, and means weighted by counts come from these. mean, var and
# cov are right. Nothing is said.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet dask==2026.8.0 numpy==2.4.6
"$folder/venv/bin/python" -W error - <<'PYTHON'
import dask
import dask.array
import numpy as np

assert dask.__version__ == "2026.8.0", dask.__version__

for dtype, number, norm, average in (
    ("uint8", 100, 6.93, 36),
    ("int8", 100, 6.93, 4),
    ("int32", 100_000, 65_039.96, 100_000),
    ("int64", 100_000, 173_205.08, 100_000),
):
    array, weights = np.full(3, number, dtype), np.array([3, 2, 3], dtype)
    lazy, lazy_weights = (dask.array.from_array(each, chunks=2) for each in (array, weights))
    seen = round(float(dask.array.linalg.norm(lazy).compute()), 2)
    mean = float(dask.array.average(lazy, weights=lazy_weights).compute())
    right = round(float(np.linalg.norm(array)), 2), float(np.average(array, weights=weights))
    print(f"{dtype}, three times {number}: norm {seen}, weighted average {mean}; NumPy {right[0]}, {right[1]}")
    assert right == (round(number * 3**0.5, 2), number), "NumPy"
    assert (seen, mean) == (norm, average), "changed"
    assert lazy.mean().compute() == number and lazy.var().compute() == 0, "changed: mean and var"
PYTHON
