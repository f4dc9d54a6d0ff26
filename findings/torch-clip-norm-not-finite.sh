#!/usr/bin/env bash
# PyTorch 2.13.0: clip_grad_norm_ zeroes finite half gradients, and to measure a norm can make gradients NaN.
#
# Seen with torch 2.13.0 (CPU), numpy 2.3.5, Python 3.11: 100,000 float16 gradients of 300 have a norm of 94,868,
# which float16 cannot hold. clip_grad_norm_ returns inf and sets every gradient to 0, those of float32
# parameters in the same call included; the step is lost without a word, although no gradient
# overflowed. clip_grad_norm_(parameters, inf), the way to measure a norm without clipping, leaves finite
# gradients alone, but with one infinite gradient it makes all gradients NaN, also of other parameters.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import math

import torch
from torch.nn.utils import clip_grad_norm_

assert torch.__version__.startswith("2.13.0"), torch.__version__


def clipped(limit, *gradients):
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients):
        parameter.grad = gradient.clone()
    norm = clip_grad_norm_(parameters, limit).item()
    return norm, [parameter.grad for parameter in parameters]


half, single = torch.full([100_000], 300.0, dtype=torch.float16), torch.ones(1)
norm, (of_half, of_single) = clipped(1.0, half, single)
norm_float, (of_float, _) = clipped(1.0, half.float(), single)
print(f"float16: norm {norm}, gradients {of_half[0]} and {of_single[0]}")
print(f"the same in float32: norm {norm_float:.0f}, first gradient {of_float[0]:.5f}")
assert norm == math.inf and not of_half.any() and not of_single.any(), "changed: half gradients"
assert 94_000 < norm_float < 95_000 and of_float[0] > 0, "changed: the same in float32"

norm, (first, second) = clipped(math.inf, torch.tensor([1.0, math.inf]), torch.tensor([2.0]))
print(f"limit inf, gradients [1, inf] and [2]: norm {norm}, gradients {first.tolist()} and {second.tolist()}")
assert norm == math.inf and first.isnan().all() and second.isnan().all(), "changed: an infinite gradient"
_, (first, second) = clipped(math.inf, torch.tensor([1.0, 3.0]), torch.tensor([2.0]))
assert first.tolist() == [1, 3] and second.tolist() == [2], "changed: finite gradients"
PYTHON
