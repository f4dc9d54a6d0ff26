#!/usr/bin/env bash
# torcheval 0.0.7: metrics of a window that were saved and loaded again are computed from other updates, or are 0 or NaN.
#
# Seen with torcheval 0.0.7, torch 2.13.0 (CPU), numpy 2.4.6, Python 3.11. The buffer is part of state_dict(), but not
# the number of updates so far, nor the place of the next one. After loading, a window counts as empty although it is
# full, and the next update overwrites another one than the oldest. The values over all updates, beside them, are
# right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torcheval==0.0.7 torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from torcheval.metrics import WindowedClickThroughRate, WindowedMeanSquaredError

BATCHES = [torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0]), torch.tensor([0.0, 1.0])]


def values(kind, size, loads, *zeros):
    metric = kind(max_num_updates=size, enable_lifetime=False)
    for batch in BATCHES:
        metric.update(batch, *zeros)
        if loads:
            state, metric = metric.state_dict(), kind(max_num_updates=size, enable_lifetime=False)
            metric.load_state_dict(state)
    return round(metric.compute().item(), 4)


for kind, zeros, expected in (
    (WindowedClickThroughRate, (), [(0.75, 0.5), (0.5, 0.0)]),
    (WindowedMeanSquaredError, (torch.zeros(2),), [(0.75, 0.5), (0.5, 0.5)]),
):
    seen = [tuple(values(kind, size, loads, *zeros) for loads in (False, True)) for size in (2, 5)]
    for size, (kept, loaded) in zip((2, 5), seen):
        print(f"{kind.__name__} of the last {size} updates: {kept}; saved and loaded after each of them: {loaded}")
    assert seen == expected, f"changed: {seen}"
PYTHON
