#!/usr/bin/env bash
# pyarrow 26.0.1: cubes whose axes were moved come back with other axes.
#
# Seen with pyarrow 26.0.1 and 25.0.1, numpy 2.4.6, Python 3.11: FixedShapeTensorArray.from_numpy_ndarray takes arrays
# with permuted axes, and notes the permutation in the type. For three axes it notes the inverse one: volumes that are
# stored as x, y, z and turned to z, x, y by np.moveaxis come back from to_numpy_ndarray() as y, z, x. Where all sides
# have one length, as patches of 32 by 32 by 32, the shape is as expected and only the numbers are not; others come back
# with another shape, or with an error. Single tensors are wrong too, and files of Parquet keep it. A permutation that
# is its own inverse, as of a transposed matrix, is right, and so is a copy by np.ascontiguousarray. Nothing is said.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet pyarrow==26.0.1 numpy==2.4.6
"$folder/venv/bin/python" -W error - "$folder/volumes.parquet" <<'PYTHON'
import sys

import numpy as np
import pyarrow
import pyarrow.parquet

assert pyarrow.__version__ == "26.0.1", pyarrow.__version__


def stored(array):
    """Return the tensors, the array that they give, and the one that a file of them gives."""
    tensors = pyarrow.FixedShapeTensorArray.from_numpy_ndarray(array)
    pyarrow.parquet.write_table(pyarrow.table({"volumes": tensors}), sys.argv[1])
    (chunk,) = pyarrow.parquet.read_table(sys.argv[1])["volumes"].chunks
    return tensors, tensors.to_numpy_ndarray(), chunk.to_numpy_ndarray()


volumes = np.arange(2 * 32**3, dtype="float32").reshape(2, 32, 32, 32)
moved = np.moveaxis(volumes, 3, 1)
tensors, seen, from_file = stored(moved)
orders = {"xyz": volumes, "zxy": moved, "yzx": np.moveaxis(volumes, 1, 3)}
found = [order for order, array in orders.items() if np.array_equal(seen, array)]
print(f"volumes in the order zxy come back as {found}, {np.sum(seen == moved) / seen.size:.1%} of the numbers are right")
print(f"their type: {tensors.type}")
assert found == ["yzx"] and np.array_equal(from_file, seen), "changed"
assert not np.array_equal(tensors[0].to_numpy(), moved[0]), "changed: single tensors"
assert np.array_equal(stored(np.ascontiguousarray(moved))[1], moved), "changed: copies"
matrices = volumes[:, 0].transpose(0, 2, 1)
assert np.array_equal(stored(matrices)[1], matrices), "changed: matrices"
PYTHON
