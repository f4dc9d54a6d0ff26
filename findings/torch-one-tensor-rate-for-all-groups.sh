#!/usr/bin/env bash
# PyTorch 2.13.0: with a tensor as learning rate all parameter groups share it, and schedulers mix them up.
#
# Seen with torch 2.13.0 (CPU), numpy 2.3.5, Python 3.11: an optimizer with two parameter groups that is
# given lr=torch.tensor(1.0) puts the same tensor into both groups. LambdaLR with one function for each
# group writes both results into it, so that both groups have the rate of the last function; and
# ReduceLROnPlateau multiplies it once for each group, so that a factor of 0.5 makes a quarter of it. With
# lr=1.0 each group has its own rate. A rate that is a tensor is what compiled and captured steps need.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

assert torch.__version__.startswith("2.13.0"), torch.__version__


def rates(lr, make, *step):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(2)]
    optimizer = torch.optim.SGD(groups, lr=lr)
    scheduler = make(optimizer)
    seen = []
    for _ in range(3):
        optimizer.step()
        scheduler.step(*step)
        seen.append(tuple(float(group["lr"]) for group in optimizer.param_groups))
    return seen


def constant_and_falling(optimizer):
    return LambdaLR(optimizer, [lambda epoch: 1.0, lambda epoch: 0.5**epoch])


def plateau(optimizer):
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


halves, quarters = (1.0, 0.5, 0.25), (1.0, 0.25, 0.0625)
for name, case, of_number, of_tensor in (
    ("LambdaLR", [constant_and_falling], [(1.0, 0.5), (1.0, 0.25), (1.0, 0.125)], [(r, r) for r in (0.5, 0.25, 0.125)]),
    ("ReduceLROnPlateau", [plateau, 1.0], [(r, r) for r in halves], [(r, r) for r in quarters]),
):
    number, tensor = rates(1.0, *case), rates(torch.tensor(1.0), *case)
    print(f"{name}: rates of the two groups with lr=1.0 {number}, with lr=torch.tensor(1.0) {tensor}")
    assert number == of_number, "changed: with a number"
    assert tensor == of_tensor, "changed: with a tensor"
PYTHON
