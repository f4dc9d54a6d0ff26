#!/usr/bin/env bash
# Keras 3.15.1 on torch: BatchNormalization and GroupNormalization return wrong numbers, or NaN, for inputs far from 0.
#
# Seen with Keras 3.15.1, torch 2.13.0 (CPU), jax 0.10.2, numpy 2.4.6, Python 3.11: on torch, keras.ops.moments takes
# the variance as the mean of squares minus the square of the mean, in float32. With a deviation of 1 it is 0.875
# instead of 0.894 at a mean of 1000, and outputs differ by 0.2 (BatchNormalization) and 1 (GroupNormalization); at
# 10,000 it is 16 in one column, and less than 0 in others, which gives NaN. Inputs that are not scaled, such as years,
# temperatures in kelvin, pressures, prices, or coordinates, are what a first BatchNormalization is for. JAX and
# TensorFlow are right, and so are LayerNormalization and keras.ops.var, so the same model differs between backends.
# Nothing is said.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet keras==3.15.1 torch==2.13.0 jax==0.10.2 numpy==2.4.6
cat >"$folder/script.py" <<'PYTHON'
import keras
import numpy as np

assert keras.__version__ == "3.15.1", keras.__version__
WRONG = {0: (1e-5, 1e-5), 1000: (0.1, 0.5), 10_000: (0.5, 0.5)}  # on torch: the least error


def normalized(inputs, axis):
    inputs = inputs.astype("float64")
    return (inputs - inputs.mean(axis, keepdims=True)) / np.sqrt(inputs.var(axis, keepdims=True) + 1e-3)


def error(outputs, inputs, axis):
    return float(abs(keras.ops.convert_to_numpy(outputs) - normalized(inputs, axis)).max())


for mean, wrong in WRONG.items():
    inputs = (np.random.default_rng(0).normal(size=(256, 16)) + mean).astype("float32")
    variance = float(keras.ops.convert_to_numpy(keras.ops.moments(inputs, axes=[0])[1])[0])
    seen = (
        error(keras.layers.BatchNormalization()(inputs, training=True), inputs, 0),
        error(keras.layers.GroupNormalization(1)(inputs), inputs, 1),
    )
    layer = error(keras.layers.LayerNormalization()(inputs), inputs, 1)
    print(
        f"{keras.backend.backend()}, mean {mean}: variance {variance:.3f} of {inputs[:, 0].astype('float64').var():.3f}; largest "
        f"error {seen[0]:.1e} of BatchNormalization, {seen[1]:.1e} of GroupNormalization, {layer:.1e} of LayerNormalization"
    )
    assert layer < 1e-2, "changed: LayerNormalization"
    if keras.backend.backend() == "jax" or not mean:
        assert max(seen) < 1e-2, "changed: right results"
    else:
        for each, least in zip(seen, wrong, strict=True):
            assert np.isnan(each) or each > least, "changed"
PYTHON
for backend in jax torch; do
    KERAS_BACKEND=$backend "$folder/venv/bin/python" -W ignore "$folder/script.py"
done
