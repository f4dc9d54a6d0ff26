#!/usr/bin/env bash
# safetensors 0.8.0: save_file of numpy arrays writes memory as it lies, so transposed arrays come back scrambled.
#
# Seen with safetensors 0.8.0, numpy 2.4.6, Python 3.11: safetensors.numpy.save_file and save take an array in Fortran
# order, such as a transposed one, and write its memory under its shape: of [[0, 1, 2], [3, 4, 5]] in Fortran
# order load_file reads [[0, 3, 1], [4, 2, 5]]. Of every second entry of 0 to 5, which is 0, 2, 4, it reads 0,
# 1, 2. Nothing is said. safetensors.torch refuses such tensors, and a copy in C order
# (numpy.ascontiguousarray) is right. Weights that are kept transposed, or cut from a larger array, are lost.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet safetensors==0.8.0 numpy==2.4.6
"$folder/venv/bin/python" - "$folder/weights.safetensors" <<'PYTHON'
import sys

import numpy as np
import safetensors
from safetensors.numpy import load, load_file, save, save_file

assert safetensors.__version__ == "0.8.0", safetensors.__version__
file = sys.argv[1]
matrix, row = np.arange(6.0).reshape(2, 3), np.arange(6.0)
for what, array, expected in (
    ("a matrix in Fortran order", np.asfortranarray(matrix), [[0, 3, 1], [4, 2, 5]]),
    ("a transposed matrix", matrix.T, [[0, 1], [2, 3], [4, 5]]),
    ("every second entry", row[::2], [0, 1, 2]),
):
    save_file({"weight": array}, file)
    read, copied = load_file(file)["weight"].tolist(), np.ascontiguousarray(array)
    print(f"{what}, {array.tolist()}: read back as {read}")
    assert read == expected != array.tolist(), f"changed: {what}"
    assert load(save({"weight": array}))["weight"].tolist() == expected, f"changed: {what}, with save()"
    save_file({"weight": copied}, file)
    assert load_file(file)["weight"].tolist() == array.tolist(), "a copy in C order is read back"
PYTHON
