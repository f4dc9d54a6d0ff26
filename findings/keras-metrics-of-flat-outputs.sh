#!/usr/bin/env bash
# Keras 3.15.1: metrics of outputs of shape (batch,) count a short batch as much as a full one.
#
# Seen with keras 3.15.1, jax 0.10.2, numpy 2.4.6, Python 3.11; the same with TensorFlow 2.21.0 and torch 2.13.0:
# metrics made of a function, MeanAbsoluteError and MeanSquaredError among them, average over the last axis. If that
# is the batch, as for a model whose last operation squeezes, or in a loop of one's own with flat arrays, each
# update has the weight of one sample. `evaluate` of errors 1, 1, 1, 1 and 11 in batches of 4 reports a loss
# "mae" of 3 and a metric "mae" of 6, and a mean squared error of 61 beside its root 5. It is the last batch
# that is short: the reported number depends on the batch size, and on which samples come last.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet keras==3.15.1 jax==0.10.2 numpy==2.4.6
KERAS_BACKEND=jax "$folder/venv/bin/python" -W error::UserWarning - <<'PYTHON'
import keras
import numpy as np

assert keras.__version__ == "3.15.1", keras.__version__

errors = np.array([1.0, 1.0, 1.0, 1.0, 11.0])
mean, mean_square = np.abs(errors).mean(), np.square(errors).mean()


class Flat(keras.Model):
    def call(self, inputs):
        return inputs[:, 0]


class Column(keras.Model):
    def call(self, inputs):
        return inputs


def evaluate(model, targets, batch_size):
    model.compile(loss="mae", metrics=["mae", "mse", keras.metrics.RootMeanSquaredError(name="rmse")])
    seen = model.evaluate(errors[:, None], targets, batch_size=batch_size, verbose=0, return_dict=True)
    return [round(float(seen[name]), 4) for name in ("loss", "mae", "mse", "rmse")]


right = [mean, mean, mean_square, mean_square**0.5]
print(f"mean absolute error {mean}, mean squared error {mean_square}, its root {mean_square**0.5}")
for batch_size, mae, mse in ((5, mean, mean_square), (4, (1 + 11) / 2, (1 + 121) / 2), (2, (1 + 1 + 11) / 3, (1 + 1 + 121) / 3)):
    flat = evaluate(Flat(), np.zeros(5), batch_size)
    column = evaluate(Column(), np.zeros((5, 1)), batch_size)
    print(f"batches of {batch_size}: loss, mae, mse, rmse of shape (batch,) {flat}, of shape (batch, 1) {column}")
    assert column == right, "changed: columns"
    assert np.allclose(flat, [mean, mae, mse, mean_square**0.5], atol=1e-4), "changed: flat outputs"

metric = keras.metrics.MeanAbsoluteError()
metric.update_state(np.zeros(4), errors[:4])
metric.update_state(np.zeros(1), errors[4:])
print(f"MeanAbsoluteError of the same numbers, in updates of 4 and 1: {float(metric.result())}")
assert float(metric.result()) == 6, "changed: update_state"
PYTHON
