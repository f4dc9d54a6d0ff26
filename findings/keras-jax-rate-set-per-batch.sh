#!/usr/bin/env bash
# Keras 3.15.1 on JAX: a rate set through the optimizer itself is lost, through the callback's model it is kept.
#
# Seen with keras 3.15.1, jax 0.10.2, numpy 2.4.6, Python 3.11: on_train_batch_begin sets the learning rate
# of the optimizer that the program holds, and reads it back. fit() takes every step with the rate
# that the epoch's first batch had, leaves that rate in the optimizer, and says nothing. The same
# assignment through self.model.optimizer, the same object, takes effect, because reading the property
# `model` of a callback has a side effect: it copies JAX's state back into the variables. So a
# LambdaCallback that closes over the optimizer trains otherwise than a subclass of Callback does.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet keras==3.15.1 jax==0.10.2 numpy==2.4.6
KERAS_BACKEND=jax "$folder/venv/bin/python" -W ignore - <<'PYTHON'
import keras
import numpy as np

assert keras.__version__ == "3.15.1", keras.__version__
RATES = [0.5, 0.25, 0.125]


class Rates(keras.callbacks.Callback):
    def __init__(self, optimizer):
        super().__init__()
        self.optimizer, self.read = optimizer, []

    def on_train_batch_begin(self, batch, logs=None):
        optimizer = self.optimizer or self.model.optimizer
        optimizer.learning_rate = RATES[batch]
        self.read.append(float(optimizer.learning_rate))


def moved(held):
    """Return what was read back, how far the weight went, and the rate that fit() leaves."""
    layers = [keras.Input([1]), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    model = keras.Sequential(layers)
    # The gradient of this loss is -1 in every step, so that the weight is the sum of the rates.
    model.compile(keras.optimizers.SGD(1.0), loss=lambda y, out: -out)
    rates = Rates(model.optimizer if held else None)
    model.fit(np.ones((3, 1)), np.ones((3, 1)), batch_size=1, shuffle=False, verbose=0, callbacks=[rates])
    return rates.read, float(model.get_weights()[0][0, 0]), float(model.optimizer.learning_rate)


held, by_model = moved(True), moved(False)
print(f"the optimizer itself: read back {held[0]}, weight {held[1]}, rate at the end {held[2]}")
print(f"self.model.optimizer: read back {by_model[0]}, weight {by_model[1]}, rate at the end {by_model[2]}")
assert held == (RATES, 3 * RATES[0], RATES[0]), "changed: through the optimizer itself"
assert by_model == (RATES, sum(RATES), RATES[-1]), "changed: through the model"
PYTHON
