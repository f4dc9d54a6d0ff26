#!/usr/bin/env bash
# torchmetrics 1.9.0: SumMetric counts to 16,777,216 and no further, and so do the weights of MeanMetric.
#
# Seen with Python 3.11, PyTorch 2.13.0. Both keep their sums as float32, also for Python's integers and for tensors of
# int64. Once 2**24 are counted, adding 1 changes nothing, however often: a count of tokens or samples that grows
# by small batches stands still, and the divisor of a mean with it. Nothing is said.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 torchmetrics==1.9.0
cat >"$folder/counts.py" <<'PYTHON'
import torch
import torchmetrics

tokens, weights = torchmetrics.SumMetric(), torchmetrics.MeanMetric()
tokens.update(torch.tensor(2**24))
for _ in range(1000):
    tokens.update(1)
weights.update(1.0, weight=2**24)
for _ in range(1000):
    weights.update(0.0)
print(f"tokens: {int(tokens.compute())} of {2**24 + 1000}; weight: {int(weights.weight)} of {2**24 + 1000}")
PYTHON
"$folder/venv/bin/python" "$folder/counts.py" >"$folder/output" 2>&1
grep -Fx "tokens: 16777216 of 16778216; weight: 16777216 of 16778216" "$folder/output" || { echo "changed:"; cat "$folder/output"; exit 1; }
