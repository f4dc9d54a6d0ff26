#!/usr/bin/env bash
# dadaptation 3.2: DAdaptAdaGrad and DAdaptAdan move all groups at the rate of the group with the largest one.
#
# Seen with dadaptation 3.2, torch 2.13.0 (CPU), numpy 2.4.6, Python 3.11: `lr` is a factor of the rate that is estimated. A group
# with 0.01 beside one with 1, as for the pretrained layers below a new head, moves exactly as far as that one: a hundred
# times as far as with 0.01 in both. Each group, the state and what a scheduler logs say 0.01. DAdaptAdam, DAdaptSGD and
# DAdaptLion refuse such groups with RuntimeError.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet dadaptation==3.2 torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version

import dadaptation
import torch

assert (version("dadaptation"), torch.__version__[:6]) == ("3.2", "2.13.0")


def moved(name, *rates):
    """How far the weights of each group are after five steps."""
    groups = [{"params": [torch.nn.Parameter(torch.ones(3))], "lr": rate} for rate in rates]
    weights = [group["params"][0] for group in groups]
    optimizer = getattr(dadaptation, name)(groups, d0=0.01)
    for _ in range(5):
        for weight in weights:
            weight.grad = torch.ones(3)
        optimizer.step()
    assert [group["lr"] for group in optimizer.param_groups] == [*rates], "changed: lr"
    return [1 - weight[0].item() for weight in weights]


for name in ("DAdaptAdaGrad", "DAdaptAdan"):
    both, low = moved(name, 1.0, 0.01), moved(name, 0.01, 0.01)
    print(f"{name}: rates 1 and 0.01 move by {both[0]:.5f} and {both[1]:.5f}; 0.01 and 0.01 by {low[0]:.5f} and {low[1]:.5f}")
    assert both[0] == both[1] > 50 * low[1] > 0, "changed"
for name in ("DAdaptAdam", "DAdaptSGD", "DAdaptLion"):
    try:
        moved(name, 1.0, 0.01)
    except RuntimeError as error:
        print(f"{name}: RuntimeError: {str(error)[:60]}...")
    else:
        raise SystemExit(f"changed: {name}")
PYTHON
