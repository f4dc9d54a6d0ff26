#!/usr/bin/env bash
# PyTorch 2.13.0: ReduceLROnPlateau never lowers the rate while a negative loss stands still.
#
# Seen with torch 2.13.0 (CPU), numpy 2.3.5, Python 3.11: with its defaults (mode="min", threshold 1e-4,
# relative) a value is better if it is below best * (1 - 1e-4). For a best of -1 that is -0.9999, so that
# -1 counts as better than -1, and even a loss that gets a little worse in each epoch replaces `best` and
# resets the count of bad epochs. The same losses plus 2 lower the rate every second epoch. So a log
# likelihood or a negated score never triggers it; threshold_mode="abs" behaves.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

assert torch.__version__.startswith("2.13.0"), torch.__version__


def rates(losses, **how):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=1, **how)
    seen = []
    for loss in losses:
        scheduler.step(loss)
        seen.append(optimizer.param_groups[0]["lr"])
    return seen, scheduler.best


lowered = [1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125]
still, rising = [-1.0] * 8, [-1.0 + 1e-5 * epoch for epoch in range(8)]
for name, losses in (("that stands still", still), ("that rises", rising)):
    negative, best = rates(losses)
    positive, _ = rates([loss + 2 for loss in losses])
    absolute, best_absolute = rates(losses, threshold_mode="abs")
    print(f"a loss from -1 {name}: rates {negative}, best {best:.5f}; plus 2: rates {positive}")
    assert negative == [1.0] * 8 and best == losses[-1], "changed: the negative loss"
    assert positive == lowered, "changed: the positive loss"
    assert absolute == lowered and best_absolute == -1.0, "changed: an absolute threshold"
PYTHON
