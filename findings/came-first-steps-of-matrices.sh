#!/usr/bin/env bash
# came-pytorch 0.1.3: the first steps move matrices by eleven times the rate and more, and vectors by a tenth of it.
#
# Seen with came-pytorch 0.1.3, torch 2.13.0 (CPU), numpy 2.4.6, Python 3.11, betas at their default: for parameters of two or
# more axes CAME divides by an average of what it calls the instability, which begins at 0 with the weight 0.9999, and is not
# corrected for that, as Adam does it. The first step of a matrix is 11.1 times the rate. If the gradient stays, it is 34
# times in the tenth step, and 51 times in the thousandth; with gradients that are noise alone it falls from 11 to below
# 1 in a thousand steps. Biases and norms begin with 0.1 times, as with Adam without correction. So a short fine-tuning, or a
# restart without the state, moves weights by far more than the rate that is logged. Nothing is said.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet came-pytorch==0.1.3 torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version

import torch
from came_pytorch import CAME

assert (version("came-pytorch"), torch.__version__[:6]) == ("0.1.3", "2.13.0")


def sizes(shape, gradient, steps=(1, 10, 100, 1000), rate=0.001):
    """The root mean square of some steps, divided by the rate."""
    torch.manual_seed(0)
    weight, seen = torch.nn.Parameter(torch.zeros(shape)), []
    optimizer = CAME([weight], lr=rate)
    for step in range(1, max(steps) + 1):
        before, weight.grad = weight.detach().clone(), gradient(shape)
        optimizer.step()
        if step in steps:
            seen.append(round((weight.detach() - before).square().mean().sqrt().item() / rate, 2))
    return seen


for name, gradient in (("always 1", torch.ones), ("noise", torch.randn)):
    matrix, vector = sizes((64, 64), gradient), sizes((64,), gradient)
    print(f"gradients {name}: steps 1, 10, 100, 1000 in rates: matrix {matrix}; vector {vector}")
    assert abs(matrix[0] - 11.11) < 0.1 and abs(vector[0] - 0.1) < 0.01, "changed: first step"
    if gradient is torch.ones:
        assert 30 < matrix[1] < 40 and 45 < matrix[3] < 60 and vector[3] == 1, "changed: constant gradients"
    else:
        assert 6 < matrix[1] < 9 and matrix[3] < 1, "changed: noise"
PYTHON
