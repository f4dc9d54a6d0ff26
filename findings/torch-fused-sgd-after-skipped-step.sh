#!/usr/bin/env bash
# PyTorch 2.13.0: SGD with fused=True takes a step that GradScaler skipped for its first one.
#
# Seen with torch 2.13.0 (CPU), numpy 2.3.5, Python 3.11: SGD's velocity begins with the first gradient, without
# dampening. If GradScaler skips the first step, because a gradient was not finite, SGD without fused keeps no
# trace of it. Fused SGD has then made a velocity that nothing has filled, and adds the next gradient to
# what lay in that memory: with weights at 0, rate 1 and gradients of 1 the weight was -0.5, or -2885. Ranks
# that each hold the state drift apart. GradScaler's first steps are those that are most often
# skipped, because its scale starts at 65536. Adam and AdamW give the same weights either way.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import math

import torch

assert torch.__version__.startswith("2.13.0"), torch.__version__


def weights(make, gradients, fused):
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = make([weight], fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    seen = []
    for gradient in gradients:
        optimizer.zero_grad()
        scaler.scale((weight * gradient).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append(round(weight.item(), 5))
    return seen


def sgd(parameters, fused):
    return torch.optim.SGD(parameters, lr=1.0, momentum=0.5, dampening=0.5, fused=fused)


def adam(parameters, fused):
    return torch.optim.Adam(parameters, lr=0.1, fused=fused)


for name, make in (("SGD", sgd), ("Adam", adam)):
    for gradients in ([1.0, 1.0, 1.0], [math.inf, 1.0, 1.0]):
        plain, fused = (weights(make, gradients, fused) for fused in (False, True))
        # The next print differs from run to run where fused SGD goes wrong.
        print(f"{name}, gradients {gradients}: weights {plain}, with fused=True {fused}")
        differ = name == "SGD" and gradients[0] == math.inf
        assert (plain != fused) == differ, f"changed: {name}"
        if differ:
            assert plain == [0.0, -1.0, -2.0] and fused[0] == 0, "changed: the weights"
PYTHON
