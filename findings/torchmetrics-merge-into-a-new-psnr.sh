#!/usr/bin/env bash
# torchmetrics 1.9.0: PeakSignalNoiseRatio merged into a new one is NaN, and stays so.
#
# Seen with torchmetrics 1.9.0, torch 2.13.0 (CPU), numpy 2.4.6, Python 3.11. merge_state() is there to add up metrics
# of several processes or files. The range that a PSNR is given is a state that is averaged over updates; a new metric
# has had none, and the average divides by 0. MeanSquaredError and SumMetric, whose states are summed, take the same
# call.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torchmetrics==1.9.0 torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import math

import torch
from torchmetrics import MeanSquaredError
from torchmetrics.image import PeakSignalNoiseRatio

images = torch.linspace(0, 1, 16).reshape(1, 1, 4, 4)
for make in (MeanSquaredError, lambda: PeakSignalNoiseRatio(data_range=1.0)):
    shard, total = make(), make()
    shard.update(images, images * 0.9)
    total.merge_state(shard)
    total.update(images, images * 0.9)
    values = round(shard.compute().item(), 4), round(total.compute().item(), 4)
    print(f"{type(shard).__name__}: of a shard {values[0]}; merged into a new one, and updated again {values[1]}")
    assert math.isnan(values[1]) if isinstance(shard, PeakSignalNoiseRatio) else values[0] == values[1], "changed"
PYTHON
