#!/usr/bin/env bash
# netCDF4 1.7.5.1: pixels of 255, and samples of 65535 or -32767, are read as missing.
#
# Seen with netCDF4 1.7.5.1.post1, xarray 2026.9.0, numpy 2.4.6, Python 3.11: each type has a number that stands for what was never
# written, and netCDF4 masks it when it reads, also in a variable that was written as a whole and names no fill
# value. For uint8 it is 255, for uint16 65535, for int16 -32767: white or saturated pixels, and the loudest samples. They
# leave means, deviations and maxima, by which data are normalized: that of 255, 255, 255, 1 is 1. xarray reads the same
# file with all numbers, and so does set_auto_mask(False). Nothing is said.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet netCDF4==1.7.5.1.post1 xarray==2026.9.0 numpy==2.4.6
"$folder/venv/bin/python" -W error - "$folder/images.nc" <<'PYTHON'
import sys
from importlib.metadata import version

import netCDF4
import numpy as np
import xarray

assert (version("netCDF4"), xarray.__version__) == ("1.7.5.1.post1", "2026.9.0")

for dtype, number in (("uint8", 255), ("uint16", 65535), ("int16", -32767), ("int16", 32767)):
    written = np.array([number, number, number, 1], dtype)
    with netCDF4.Dataset(sys.argv[1], "w") as file:
        file.createDimension("n", 4)
        file.createVariable("x", dtype, ("n",))[:] = written
    with netCDF4.Dataset(sys.argv[1]) as file:
        read = file["x"][:]
        file.set_auto_mask(False)
        plain = file["x"][:]
    with xarray.open_dataset(sys.argv[1]) as dataset:
        by_xarray = dataset["x"].values
    print(f"{dtype}, {written.tolist()}: netCDF4 reads {read}, mean {read.mean()}; xarray {by_xarray.tolist()}")
    assert plain.tolist() == by_xarray.tolist() == written.tolist(), "changed: without the mask"
    masked = number != 32767
    assert np.ma.getmaskarray(read).tolist() == [masked] * 3 + [False], "changed: mask"
    assert read.mean() == (1 if masked else written.mean()), "changed: mean"
PYTHON
