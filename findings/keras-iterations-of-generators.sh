#!/usr/bin/env bash
# Keras 3.15.1 on TensorFlow: after fit() on a Python generator the optimizer has counted one step too many.
#
# Seen with keras 3.15.1, tensorflow-cpu 2.21.0, numpy 2.4.6, Python 3.11: fit() on a generator of n batches
# takes n steps, as the weights of SGD and the generator's own count show, and leaves
# optimizer.iterations at n + 1. On arrays it is n, and so it is with the torch backend. Learning rate
# schedules, Adam's bias correction and whatever reads `iterations` to resume run ahead by one
# step for each call of fit().
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet keras==3.15.1 tensorflow-cpu==2.21.0 numpy==2.4.6
TF_CPP_MIN_LOG_LEVEL=3 KERAS_BACKEND=tensorflow "$folder/venv/bin/python" -W ignore - <<'PYTHON'
import keras
import numpy as np

assert keras.__version__ == "3.15.1", keras.__version__


def fitted(data, **how):
    layers = [keras.Input([1]), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(*data, verbose=0, **how)
    return int(model.optimizer.iterations.numpy()), float(model.get_weights()[0][0, 0])


for batches in (1, 2, 3):
    given = []

    def generator():
        for _ in range(batches):
            given.append(None)
            yield np.ones((2, 1)), np.ones((2, 1))

    ones = np.ones((2 * batches, 1))
    of_arrays, weight = fitted((ones, ones), batch_size=2)
    of_generator, same_weight = fitted((generator(),))
    print(f"{batches} batches: iterations {of_arrays} with arrays, {of_generator} with a generator; weights equal")
    assert len(given) == batches and abs(weight - same_weight) < 1e-6
    assert of_arrays == batches, "changed: arrays"
    assert of_generator == batches + 1, "changed: generators are counted right"
PYTHON
