#!/usr/bin/env bash
# pytorch_optimizer 4.1.0: the first step of SRMM multiplies all weights by 0.7071, also with a rate of 0.
#
# Seen with pytorch_optimizer 4.1.0, torch 2.13.0 (CPU), numpy 2.4.6, Python 3.11. The running average of the weights
# begins with 0, and the first step takes a share of 2 ** -0.5 of the weight instead of all of it, because the count
# of steps is raised before; then the average replaces the weight. A pretrained model, and groups that a rate of 0
# should freeze, lose 29 % of each weight.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet pytorch_optimizer==4.1.0 torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from pytorch_optimizer import SRMM

for memory_length, expected in ((100, 0.7071), (1, 1.0), (None, 1.0)):
    for rate in (0.0, 1e-6):
        weights = [torch.nn.Parameter(torch.tensor([value])) for value in (1.0, -4.0)]
        optimizer = SRMM(weights, lr=rate, memory_length=memory_length)
        for weight in weights:
            weight.grad = torch.full((1,), 1e-6)
        optimizer.step()
        after = [round(weight.item(), 4) for weight in weights]
        print(f"memory_length={memory_length}, lr={rate}: 1 and -4 are {after} after a step")
        assert after == [expected, round(-4 * 0.5**0.5, 4) if expected < 1 else -4.0], "changed"
PYTHON
