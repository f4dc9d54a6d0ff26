#!/usr/bin/env bash
# h5py 3.16.0: the label -1 becomes 0 in a dataset of uint8, or 255, or is refused, by the way it is written.
#
# Seen with h5py 3.16.0, numpy 2.4.6, Python 3.11: HDF5 converts numbers to the nearest that the dataset's type has, where numpy
# wraps. An array of int64 with -1 or -100, the usual labels of what shall be ignored, is written to uint8 as 0, which is
# the first class; 300 is 255. A single number of numpy goes through numpy, and is 255 and 44; a list of Python integers
# raises OverflowError. Reading with astype("uint8") is HDF5's way too, so that it is not the same as astype of what was
# read. NaN is 0 in uint8, and -2147483648 in int32. Nothing is said.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet h5py==3.16.0 numpy==2.4.6
"$folder/venv/bin/python" -W error - "$folder/labels.h5" <<'PYTHON'
import sys

import h5py
import numpy as np

assert h5py.__version__ == "3.16.0", h5py.__version__
labels = np.array([-1, -100, 300, 5])

with h5py.File(sys.argv[1], "w") as file:
    dataset = file.create_dataset("labels", (4,), "uint8")
    dataset[:] = labels
    whole = dataset[:].tolist()
    for place, label in enumerate(labels):
        dataset[place] = label
    single = dataset[:].tolist()
    print(f"{labels.tolist()} written to uint8 as an array: {whole}; one by one: {single}; numpy: {labels.astype('uint8').tolist()}")
    assert whole == [0, 0, 255, 5], "changed: array"
    assert single == labels.astype("uint8").tolist() == [255, 156, 44, 5], "changed: one by one"
    try:
        dataset[:] = labels.tolist()
    except OverflowError as error:
        print(f"as a list: OverflowError: {error}")
    else:
        raise SystemExit("changed: a list is taken")

    file["wide"] = labels
    first, second = file["wide"].astype("uint8")[:].tolist(), file["wide"][:].astype("uint8").tolist()
    print(f'astype("uint8") of the dataset: {first}; of its array: {second}')
    assert (first, second) == (whole, single), "changed: astype"

    for dtype, expected in (("uint8", 0), ("int32", -(2**31))):
        numbers = file.create_dataset(dtype, (1,), dtype)
        numbers[:] = np.array([np.nan])
        print(f"NaN written to {dtype}: {numbers[0]}")
        assert numbers[0] == expected, "changed: NaN"
PYTHON
