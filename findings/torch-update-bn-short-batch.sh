#!/usr/bin/env bash
# PyTorch 2.13.0: `update_bn` counts a short last batch as much as a full one, and the variance between batches as nothing.
#
# Seen with Python 3.11 on the CPU. `torch.optim.swa_utils.update_bn` is to estimate the statistics of BatchNorm
# for averaged weights from a pass over the data. It takes the plain mean of what each batch has: of 8 samples
# at about 0 and 2 at about 10, with batches of 8, the mean becomes about 5, where the data's is 2;
# and the variance is the mean of those within batches, about 1 where the data's is 18.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat >"$folder/statistics.py" <<'PYTHON'
import torch
from torch.optim.swa_utils import update_bn

data = torch.tensor([-1.0, 1.0] * 4 + [9.0, 11.0])[:, None]
for size in (10, 8):
    layer = torch.nn.BatchNorm1d(1)
    update_bn(data.split(size), torch.nn.Sequential(layer))
    print(f"batches of {size}: mean {layer.running_mean.item():.2f}, variance {layer.running_var.item():.2f}")
PYTHON
"$folder/venv/bin/python" "$folder/statistics.py" >"$folder/output" 2>&1
for expected in "batches of 10: mean 2.00, variance 18.89" "batches of 8: mean 5.00, variance 1.57"; do
    grep -Fx "$expected" "$folder/output" || { echo "changed:"; cat "$folder/output"; exit 1; }
done
