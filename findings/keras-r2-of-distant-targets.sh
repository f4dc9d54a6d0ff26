#!/usr/bin/env bash
# Keras 3.15.1: R2Score is wrong if the targets vary little beside their size.
#
# Seen with keras 3.15.1, jax 0.10.2, numpy 2.4.6, Python 3.11; the same with torch 2.13.0: R2Score takes the variance of
# the targets as their sum of squares less the square of their sum, in float32, over all batches. Of 4,000
# coordinates around 5,400 km with a standard deviation of 1 km, which float32 holds to half a metre, it reports
# 1.11, 0.98 or 0.89 with batches of 40, 100 or 400, where the score is 0.74, and cannot exceed 1. What
# EarlyStopping or ModelCheckpoint choose by it is chance. Pressures and times are such targets, too. The same
# numbers less 5,400 km, which changes no R2, get the right score.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet keras==3.15.1 jax==0.10.2 numpy==2.4.6
KERAS_BACKEND=jax "$folder/venv/bin/python" -W error::UserWarning - <<'PYTHON'
import keras
import numpy as np

assert keras.__version__ == "3.15.1", keras.__version__

random = np.random.RandomState(0)
OFFSET = 5_400_000  # metres, as of coordinates in UTM
targets = (OFFSET + 1000 * random.randn(4000)).astype("float32")
predictions = (targets + 500 * random.randn(4000)).astype("float32")


def expected(targets, predictions):
    targets, predictions = targets.astype("float64"), predictions.astype("float64")
    return 1 - np.square(targets - predictions).sum() / np.square(targets - targets.mean()).sum()


def seen(targets, predictions, batch):
    metric = keras.metrics.R2Score()
    for start in range(0, 4000, batch):
        metric.update_state(targets[start : start + batch, None], predictions[start : start + batch, None])
    return float(metric.result())


right = expected(targets, predictions)
errors = []
for batch in (40, 100, 400):
    near, far = seen(targets - OFFSET, predictions - OFFSET, batch), seen(targets, predictions, batch)
    print(f"batches of {batch}: R2Score {far:.4f}, of the numbers less {OFFSET:,} {near:.4f}; in float64 {right:.4f}")
    assert abs(near - right) < 0.001, "changed: numbers around 0"
    errors.append(abs(far - right))
assert max(errors) > 0.05, f"changed: numbers around {OFFSET:,}"
PYTHON
