#!/usr/bin/env bash
# safetensors 0.8.0: a conjugated torch tensor is saved without its conjugation.
#
# Seen with safetensors 0.8.0, torch 2.13.0 (CPU), numpy 2.3.5, Python 3.11: torch's conj() is lazy: it only marks the
# tensor. safetensors.torch.save_file reads the memory and ignores the mark, so that 1 - 2j comes back
# as 1 + 2j, without a word; the imaginary part of a conjugated tensor comes back with the other sign.
# torch.save keeps both. Weights of spectral layers, and whatever an inverse transform or an adjoint
# (.mH) made of them, are such tensors; resolve_conj() or clone() before saving helps.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet safetensors==0.8.0 torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/python" -W ignore - "$folder/weights" <<'PYTHON'
import sys

import safetensors
import torch
from safetensors.torch import load_file, save_file

assert safetensors.__version__ == "0.8.0", safetensors.__version__
assert torch.__version__.startswith("2.13.0"), torch.__version__
file, number = sys.argv[1], torch.tensor([1 + 2j])
for what, tensor, expected in (
    ("a conjugated tensor", number.conj(), [1 + 2j]),
    ("an adjoint", number.reshape(1, 1).mH, [[1 + 2j]]),
    ("the imaginary part of a conjugated tensor", number.conj().imag, [2.0]),
    ("a conjugated tensor, resolved", number.conj().resolve_conj(), [1 - 2j]),
):
    save_file({"weight": tensor}, file)
    read = load_file(file)["weight"].tolist()
    torch.save(tensor, file)
    kept = torch.load(file, weights_only=True).tolist()
    print(f"{what}, {tensor.tolist()}: safetensors reads {read}, torch {kept}")
    assert read == expected and kept == tensor.tolist(), f"changed: {what}"
PYTHON
