#!/usr/bin/env bash
# torchmetrics 1.9.0, Ignite 0.5.5 and scikit-learn 1.9.1: errors of uint8 wrap, so that worse images score better.
#
# Seen with torchmetrics 1.9.0, pytorch-ignite 0.5.5, scikit-learn 1.9.1, torch 2.13.0 (CPU), numpy 2.4.6, Python 3.11:
# images, masks, and labels come as uint8, in which 0 - 250 is 6. MeanSquaredError of torchmetrics and Ignite takes
# differences in that type, and their squares: a black image is 36 from one of 250 instead of 62,500, and 0 from one of
# 240, the same as from itself. MeanAbsoluteError and WeightedMeanAbsolutePercentageError of torchmetrics wrap too, and
# so does scikit-learn's median_absolute_error. PSNR of torchmetrics, and scikit-learn's mean errors, are right, so that
# scores of the same images contradict each other. As float, all are right. Nothing is said.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torchmetrics==1.9.0 pytorch-ignite==0.5.5 scikit-learn==1.9.1 torch==2.13.0 numpy==2.4.6
cat >"$folder/script.py" <<'PYTHON'
import math
from importlib.metadata import version

import ignite.metrics
import sklearn.metrics
import torch
import torchmetrics
from torchmetrics.functional import image

assert [version(name) for name in ("torchmetrics", "pytorch-ignite", "scikit-learn")] == ["1.9.0", "0.5.5", "1.9.1"]


def by_ignite(metric):
    def value(images, targets):
        metric.reset()
        metric.update((images, targets))
        return metric.compute()

    return value


def by_sklearn(metric):
    return lambda images, targets: metric(targets.numpy(), images.numpy())


METRICS = {  # with 0 and 250, as uint8
    "torchmetrics MeanSquaredError": (torchmetrics.MeanSquaredError(), 36),
    "torchmetrics MeanAbsoluteError": (torchmetrics.MeanAbsoluteError(), 6),
    "torchmetrics WeightedMeanAbsolutePercentageError": (torchmetrics.WeightedMeanAbsolutePercentageError(), 0.024),
    "torchmetrics PSNR": (lambda *pair: image.peak_signal_noise_ratio(*pair, data_range=255.0), None),
    "ignite MeanSquaredError": (by_ignite(ignite.metrics.MeanSquaredError()), 36),
    "sklearn median_absolute_error": (by_sklearn(sklearn.metrics.median_absolute_error), 6),
    "sklearn mean_squared_error": (by_sklearn(sklearn.metrics.mean_squared_error), None),
    "sklearn mean_absolute_error": (by_sklearn(sklearn.metrics.mean_absolute_error), None),
}
black = torch.zeros(64, dtype=torch.uint8)
for name, (metric, wrong) in METRICS.items():
    targets = torch.full_like(black, 250)
    seen, right = float(metric(black, targets)), float(metric(black.float(), targets.float()))
    print(f"{name} of 0 and 250: {seen:.6g} as uint8, {right:.6g} as float")
    assert math.isclose(seen, right if wrong is None else wrong, rel_tol=1e-4), f"changed: {name}"
assert torchmetrics.MeanSquaredError()(black, torch.full_like(black, 240)) == 0, "changed: 240"
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/script.py"
