#!/usr/bin/env bash
# pytorch-ignite 0.5.5: metrics that keep predictions do not come back from their own state_dict(), some of them silently.
#
# Seen with pytorch-ignite 0.5.5, scikit-learn 1.9.1, torch 2.13.0 (CPU), numpy 2.4.6, Python 3.11. Metrics have
# state_dict(), which a checkpoint may hold. Accuracy and others go on from it. CohenKappa, MeanAveragePrecision and
# MutualInformation save nothing, load that without a word, and give the value of what came after the restart. ROC_AUC
# and others, also any EpochMetric, save lists, and a new metric refuses them with ValueError, since its own lists are
# empty.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet pytorch-ignite==0.5.5 scikit-learn==1.9.1 torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from ignite.metrics import ROC_AUC, Accuracy, CohenKappa, MeanAveragePrecision

predictions = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0])
labels = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1])


def value(kind, restart):
    """Return a metric of two batches, saved and loaded between them."""
    inputs = [each.unsqueeze(1) if kind is MeanAveragePrecision else each for each in (predictions, labels)]
    metric = kind()
    metric.update([each[:4] for each in inputs])
    if restart:
        saved, metric = metric.state_dict(), kind()
        try:
            metric.load_state_dict(saved)
        except ValueError:
            return "ValueError"
    metric.update([each[4:] for each in inputs])
    return round(float(metric.compute()), 4)


for kind, expected in (
    (Accuracy, (0.75, 0.75)),
    (CohenKappa, (0.5, 0.0)),
    (MeanAveragePrecision, (0.6875, 0.5)),
    (ROC_AUC, (0.75, "ValueError")),
):
    seen = value(kind, False), value(kind, True)
    print(f"{kind.__name__}: {seen[0]}; saved and loaded between two batches: {seen[1]}")
    assert seen == expected, "changed"
PYTHON
