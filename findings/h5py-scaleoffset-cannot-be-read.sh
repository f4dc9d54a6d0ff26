#!/usr/bin/env bash
# h5py 3.14.0 with HDF5 1.14.6: signed integers that it writes with scaleoffset=0 it cannot read.
#
# Seen with h5py 3.14.0, numpy 2.4.6, Python 3.11: scaleoffset=0 is to find "the minimum number of bits necessary for
# lossless compression". If a chunk of signed integers spans half of what its type holds, or more, it is
# written without an error, and each read of it fails: "filter returned failure during read". So it is with int8 from -64
# to 63 and with int16 from -16384 to 16383: quantized features and 16-bit audio. The file opens, its
# attributes, shapes and quieter chunks are read: it shows when training comes to the first loud one.
# Unsigned integers of the same span, narrower signed ones, and other filters are read as written.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet h5py==3.14.0 numpy==2.4.6
"$folder/venv/bin/python" -W error - "$folder/data.h5" <<'PYTHON'
import sys

import h5py
import numpy as np

assert (h5py.version.version, h5py.version.hdf5_version) == ("3.14.0", "1.14.6"), h5py.version.info


def read(*chunks, **filters):
    """Write chunks into a file; return for each whether it is read as it was written, or the error."""
    array = np.stack(chunks)
    with h5py.File(sys.argv[1], "w") as file:
        file.create_dataset("x", data=array, chunks=(1, array.shape[1]), **filters)
    seen = []
    with h5py.File(sys.argv[1]) as file:
        for row in range(len(array)):
            try:
                seen.append(np.array_equal(file["x"][row], array[row]))
            except OSError as error:
                seen.append(str(error))
    return seen


failure = "Can't synchronously read data (filter returned failure during read)"
for kind, unsigned, half in (("int8", "uint8", 64), ("int16", "uint16", 16384)):
    quiet, loud = np.array([[1 - half, half - 2], [-half, half - 1]], kind)
    shifted = [(chunk.astype("int64") + half).astype(unsigned) for chunk in (quiet, loud)]
    seen = read(quiet, loud, scaleoffset=0)
    print(f"{kind}, scaleoffset=0: {quiet.tolist()} {seen[0]}, {loud.tolist()} {seen[1]}")
    assert seen == [True, failure], "changed: signed integers"
    assert read(*shifted, scaleoffset=0) == [True, True], "changed: unsigned integers"
    assert read(quiet, loud, compression="gzip") == [True, True], "changed: gzip"
PYTHON
