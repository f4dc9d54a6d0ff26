#!/usr/bin/env bash
# Keras 3.15.1: EarlyStopping(restore_best_weights=True) throws the averages of use_ema away.
#
# Seen with keras 3.15.1, jax 0.10.2, numpy 2.4.6, Python 3.11; the same with TensorFlow 2.21.0 and torch 2.13.0:
# the documentation of use_ema says that fit() ends by overwriting the weights with their moving averages. It does so,
# and then EarlyStopping's on_train_end puts back the weights of the best epoch, which are not averaged:
# validation in an epoch sees plain weights, too. This holds whether it stopped training or not. Without
# the callback, or with restore_best_weights=False, the averages are what remains.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet keras==3.15.1 jax==0.10.2 numpy==2.4.6
KERAS_BACKEND=jax "$folder/venv/bin/python" -W ignore - <<'PYTHON'
import keras
import numpy as np

assert keras.__version__ == "3.15.1", keras.__version__
SCORES = [3.0, 1.0, 2.0, 2.0]  # the second epoch is the best


class Score(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        logs["score"] = SCORES[epoch]


def final_weight(*callbacks):
    """Return the weight after fit(): each epoch is one step, which adds 1 to it."""
    layers = [keras.Input([1]), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5), loss=lambda y, out: -out)
    one = np.ones((1, 1))
    history = model.fit(one, one, epochs=4, verbose=0, callbacks=[Score(), *callbacks])
    return len(history.epoch), float(model.get_weights()[0][0, 0])


def stopping(patience, restore):
    return keras.callbacks.EarlyStopping("score", patience=patience, mode="min", restore_best_weights=restore)


for what, callbacks, expected in (
    ("no EarlyStopping", [], (4, 3.125)),
    ("stopped, nothing restored", [stopping(1, False)], (3, 2.25)),
    ("stopped, best epoch restored", [stopping(1, True)], (3, 2.0)),
    ("not stopped, best epoch restored", [stopping(9, True)], (4, 2.0)),
):
    epochs, weight = final_weight(*callbacks)
    print(f"{what}: {epochs} epochs, plain weights 1 to {epochs}, final weight {weight}")
    assert (epochs, weight) == expected, f"changed: {what}"
PYTHON
