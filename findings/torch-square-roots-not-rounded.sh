#!/usr/bin/env bash
# PyTorch 2.13.0: square roots on the CPU are not the nearest numbers.
#
# Seen with torch 2.13.0 (CPU), numpy 2.3.5, Python 3.11, on an AMD EPYC: IEEE 754 asks that a square root is
# rounded correctly, and the processor's instruction, numpy and Python do so. torch.sqrt() takes those of MKL,
# which are one unit in the last place off for 20 % of float32 numbers between 0 and 1, and for 1.4 % of float64
# ones. Roots of squares of integers are right. torch.optim.Adam divides by such roots, and Adam with fused=True
# by the processor's, so the two differ even where all else is computed alike.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat >"$folder/script.py" <<'PYTHON'
import numpy
import torch

assert torch.__version__.startswith("2.13.0"), torch.__version__
generator = torch.Generator().manual_seed(0)
for dtype, least in ((torch.float32, 0.05), (torch.float64, 0.002)):
    numbers = torch.rand(1_000_000, generator=generator, dtype=dtype)
    roots, right = torch.sqrt(numbers).numpy(), numpy.sqrt(numbers.numpy())
    share = (roots != right).mean()
    largest = (abs(roots - right) / numpy.spacing(right)).max()
    print(f"{dtype}: {share:.1%} of the roots are not numpy's, by at most {largest:.0f} ulp")
    assert share > least and largest == 1, "changed: torch.sqrt() rounds correctly"
integers = torch.arange(1, 4001, dtype=torch.float32)
assert torch.equal(torch.sqrt(integers * integers), integers)
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/script.py"
