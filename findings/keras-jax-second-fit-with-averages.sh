#!/usr/bin/env bash
# Keras 3.15.1 on JAX: after fit() with use_ema=True the next fit() fails.
#
# Seen with keras 3.15.1, jax 0.10.2, numpy 2.4.6, Python 3.11: at its end fit() sets each weight to its moving
# average, and weight and average are then one JAX array. The next fit() donates both to its compiled step:
#   ValueError: ... Buffer has been deleted or donated.
# which its clean-up hides behind "TypeError: 'NoneType' object is not callable". The weights are gone, too:
# get_weights() fails. evaluate() and predict() between the two are fine; on TensorFlow and torch all of
# it works. So staged training, and resuming in the same process, fail with averages of weights.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet keras==3.15.1 jax==0.10.2 numpy==2.4.6
KERAS_BACKEND=jax "$folder/venv/bin/python" -W ignore - <<'PYTHON'
import keras
import numpy as np

assert keras.__version__ == "3.15.1", keras.__version__
ones = np.ones((2, 1))
for use_ema in (False, True):
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1, use_bias=False)])
    model.compile(keras.optimizers.SGD(0.1, use_ema=use_ema), "mse")
    model.fit(ones, ones, verbose=0)
    model.evaluate(ones, ones, verbose=0)
    try:
        model.fit(ones, ones, verbose=0)
    except TypeError as error:
        print(f"use_ema={use_ema}: the second fit() raises TypeError: {error}")
        print(f"  after ValueError: {error.__context__}")
        assert use_ema, "changed: without averages"
        assert "deleted or donated" in str(error.__context__), "changed: the reason"
    else:
        print(f"use_ema={use_ema}: the second fit() works")
        assert not use_ema, "changed: with averages"
        continue
    try:
        model.get_weights()
    except (RuntimeError, TypeError) as error:
        print(f"  and then get_weights() raises {type(error).__name__}")
    else:
        raise SystemExit("changed: weights are there afterwards")
PYTHON
