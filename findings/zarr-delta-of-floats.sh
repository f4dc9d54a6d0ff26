#!/usr/bin/env bash
# Zarr 3.1.6 with numcodecs 0.16.6: behind a NaN, the filter Delta makes NaN of all further numbers of the chunk.
#
# Seen with zarr 3.1.6, numcodecs 0.16.6, numpy 2.4.6, Python 3.11: Delta stores differences of neighbours, and adds them up
# again when it reads. It takes float32 and float64, and its documentation warns of integers that are too
# small alone. A missing value, stored as NaN, is missing in all that follow it in the chunk: of 500
# samples of a sensor with one NaN as the 6th, 5 are left, and code that skips NaN trains on these.
# Numbers much smaller than the first lose digits, or all: 0.1 behind 1e8 is read as 0. Nothing is said.
# Integers are kept, and so is NaN by the other filters.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet zarr==3.1.6 numcodecs==0.16.6 numpy==2.4.6
"$folder/venv/bin/python" -W error - <<'PYTHON'
from importlib.metadata import version

import numcodecs
import numpy as np
import zarr

assert (version("zarr"), version("numcodecs")) == ("3.1.6", "0.16.6")


def read(array, *filters):
    store = zarr.storage.MemoryStore()
    zarr.create_array(store, data=array, chunks=(500,), filters=[*filters], zarr_format=2)
    return zarr.open_array(store, mode="r")[...]


def differences(array):
    """What adding up the differences gives."""
    return np.concatenate([np.cumsum(np.diff(chunk, prepend=chunk.dtype.type(0))) for chunk in (array[:500], array[500:])])


for dtype in ("float32", "float64"):
    samples = np.linspace(20, 21, 1000, dtype=dtype)
    samples[5] = np.nan
    seen = read(samples, numcodecs.Delta(dtype))
    finite = np.flatnonzero(np.isfinite(seen[:500])).tolist()
    print(f"{dtype}, NaN at 5, chunks of 500: finite are {finite} and {np.isfinite(seen[500:]).sum()} of the next chunk")
    assert finite == [0, 1, 2, 3, 4] and np.isfinite(seen[500:]).all(), "changed: NaN"
    assert np.array_equal(read(samples), samples, equal_nan=True), "changed: no filter"
    assert np.array_equal(read(samples, numcodecs.Shuffle()), samples, equal_nan=True), "changed: Shuffle"

small = np.array([1e8, 0.1, 0.2, 0.3], "float32")
seen = read(small, numcodecs.Delta("float32"))
print(f"float32: {small.tolist()} is read as {seen.tolist()}")
assert np.array_equal(seen, differences(small)) and seen[1] == 0, "changed: small numbers"
integers = np.array([10**8, 0, 1, -5], "int32")
assert np.array_equal(read(integers, numcodecs.Delta("int32")), integers), "changed: integers"
PYTHON
