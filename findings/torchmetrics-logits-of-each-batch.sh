#!/usr/bin/env bash
# torchmetrics 1.9.0: whether outputs are logits is guessed anew for each batch, so results depend on the batches.
#
# Seen with torchmetrics 1.9.0, torch 2.13.0 (CPU), Python 3.11: metrics of classes take logits, and apply a sigmoid (or
# a softmax) if a number of the batch is outside of 0 to 1. A batch whose logits all lie between 0 and 1 is taken for
# probabilities: 0.3, which is a probability of 0.57, is below the threshold of 0.5. One model and 1000 samples have an
# accuracy of 0.76 in one batch and 0.70 one by one, and a BinaryAUROC of 0.84 and 0.77, as it then ranks mixed scales.
# Small batches, the last one of an epoch, and ranks with few samples are hit; with large ones it is right. The
# documentation says when a sigmoid is applied, not that batches differ. With a sigmoid of one's own all agree.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 torchmetrics==1.9.0
cat >"$folder/script.py" <<'PYTHON'
import torch
import torchmetrics
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC, BinaryAveragePrecision, MulticlassAUROC, MultilabelAccuracy

assert torchmetrics.__version__ == "1.9.0", torchmetrics.__version__
draw = torch.Generator().manual_seed(0)
logits = torch.randn(1000, generator=draw)
labels = (logits + torch.randn(1000, generator=draw) > 0).long()
many = torch.randn(1000, 3, generator=draw) / 2
best = (many + torch.randn(1000, 3, generator=draw) / 2).argmax(1)
CASES = {
    "BinaryAccuracy": (BinaryAccuracy(), logits, labels, torch.sigmoid),
    "BinaryAUROC": (BinaryAUROC(), logits, labels, torch.sigmoid),
    "BinaryAveragePrecision": (BinaryAveragePrecision(), logits, labels, torch.sigmoid),
    "MultilabelAccuracy": (MultilabelAccuracy(3), many, torch.nn.functional.one_hot(best, 3), torch.sigmoid),
    "MulticlassAUROC": (MulticlassAUROC(3), many, best, lambda outputs: outputs.softmax(1)),
}


def value(metric, outputs, targets, size):
    metric.reset()
    for batch in zip(outputs.split(size), targets.split(size), strict=True):
        metric.update(*batch)
    return metric.compute().item()


for name, (metric, outputs, targets, probabilities) in CASES.items():
    logit = [value(metric, outputs, targets, size) for size in (1000, 1)]
    probability = [value(metric, probabilities(outputs), targets, size) for size in (1000, 1)]
    print(f"{name}: of logits {logit[0]:.3f} in one batch, {logit[1]:.3f} one by one; of probabilities {probability}")
    assert abs(logit[0] - logit[1]) > 0.01, f"changed: {name}"
    assert max(abs(each - logit[0]) for each in probability) < 1e-3, f"changed: probabilities, {name}"
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/script.py"
