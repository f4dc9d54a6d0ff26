#!/usr/bin/env bash
# PyTorch 2.13.0: a SequentialLR takes schedulers that fail at its milestone, or later double the rate.
#
# Seen with torch 2.13.0 (CPU), numpy 2.3.5, Python 3.11: SequentialLR([warm-up, SequentialLR([...])]), or
# with a ChainedScheduler as second part, is constructed and warms up without a word, and raises
# NotImplementedError, with no text, in the step that reaches the milestone: after hours of training. The
# other way round, a ChainedScheduler of a SequentialLR and ConstantLR(factor=0.5, total_iters=6) gives
# rates above the optimizer's: the milestone sets the rate again without the factor, which ConstantLR
# then takes back all the same. ReduceLROnPlateau, in contrast, is refused at construction.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, ExponentialLR, LinearLR, SequentialLR

assert torch.__version__.startswith("2.13.0"), torch.__version__


def optimizer_of_rate_1():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def two_phases(optimizer):
    return SequentialLR(optimizer, [ExponentialLR(optimizer, 0.9), ExponentialLR(optimizer, 0.5)], [2])


def chained(optimizer):
    return ChainedScheduler([ExponentialLR(optimizer, 0.9), ConstantLR(optimizer, 0.5, 2)], optimizer)


for name, second in (("SequentialLR", two_phases), ("ChainedScheduler", chained)):
    optimizer = optimizer_of_rate_1()
    scheduler = SequentialLR(optimizer, [LinearLR(optimizer, 0.1, 1, 3), second(optimizer)], [3])
    steps = 0
    try:
        for _ in range(5):
            optimizer.step()
            scheduler.step()
            steps += 1
    except NotImplementedError as error:
        print(f"SequentialLR with a {name} as second part: {steps} steps, then NotImplementedError({str(error)!r})")
        assert str(error) == "" and steps == 2, (steps, error)
    else:
        raise SystemExit(f"changed: a {name} may be the second part")

optimizer = optimizer_of_rate_1()
warm = SequentialLR(optimizer, [LinearLR(optimizer, 0.1, 1, 3), ExponentialLR(optimizer, 0.9)], [3])
scheduler = ChainedScheduler([warm, ConstantLR(optimizer, 0.5, 6)], optimizer)
rates = []
for _ in range(6):
    optimizer.step()
    scheduler.step()
    rates.append(round(optimizer.param_groups[0]["lr"], 3))
print(f"half of (warm-up of 3 steps, then 0.9 of the rate in each) for 6 steps, optimizer's rate 1: {rates}")
assert rates == [0.2, 0.35, 1.0, 0.9, 0.81, 1.458], "changed: rates of ChainedScheduler"
PYTHON
