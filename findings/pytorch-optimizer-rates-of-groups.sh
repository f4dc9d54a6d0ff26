#!/usr/bin/env bash
# pytorch_optimizer 4.1.0: two optimizers train with other rates than their groups, or a scheduler, set.
#
# Seen with pytorch_optimizer 4.1.0, torch 2.13.0 (CPU), numpy 2.4.6, Python 3.11. GrokFastAdamW divides the learning rate
# by 3 (1 + grokfast_lamb, normalize_lr=True), but only the one of its own argument: the same rate in a
# parameter group counts three times as much, and so does one that a scheduler or a program sets in `param_groups`.
# ApolloDQN takes the rate of the first 500 steps, its warmup, from its own argument alone: a group that has its own
# rate trains at the other one, and groups that are set to 0 go on to move.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet pytorch_optimizer==4.1.0 torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version

import torch
from pytorch_optimizer import ApolloDQN, GrokFastAdamW

assert version("pytorch_optimizer") == "4.1.0", version("pytorch_optimizer")


def moved(kind, argument, group=None, later=None, steps=20):
    """Return how far a weight moves with a gradient of 1: the rate by argument, of the group, and set afterwards."""
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = kind([{"params": [weight]} if group is None else {"params": [weight], "lr": group}], lr=argument)
    if later is not None:
        optimizer.param_groups[0]["lr"] = later
    for _ in range(steps):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    return 1 - weight.item()


for kind in (torch.optim.AdamW, GrokFastAdamW, ApolloDQN):
    argument, group, later = moved(kind, 0.01), moved(kind, 1.0, group=0.01), moved(kind, 1.0, later=0.01)
    ratios = [round(each / argument, 1) for each in (group, later)]
    print(f"{kind.__name__}: the rate 0.01 in a group, or set later, moves {ratios} times as far as the argument 0.01")
    if kind is torch.optim.AdamW:
        assert all(0.9 < each < 1.2 for each in ratios), "changed: AdamW"
    elif kind is GrokFastAdamW:
        assert ratios == [3.0, 3.0], "changed: GrokFastAdamW"
    else:
        assert min(ratios) > 50, "changed: ApolloDQN"

frozen = moved(ApolloDQN, 0.01, later=0.0)
print(f"ApolloDQN: with the rate set to 0 a weight moves by {frozen:.4f}, as far as with 0.01")
assert frozen == moved(ApolloDQN, 0.01) > 0, "changed: the rate 0"
assert moved(GrokFastAdamW, 0.01, later=0.0) == 0, "changed: the rate 0"
PYTHON
