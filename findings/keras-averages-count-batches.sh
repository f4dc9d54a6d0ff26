#!/usr/bin/env bash
# Keras 3.15.1: with accumulated gradients, use_ema and the rate's schedule go by batches instead of steps.
#
# Seen with keras 3.15.1, jax 0.10.2, numpy 2.4.6, Python 3.11; the same with TensorFlow 2.21.0 and torch 2.13.0:
# with gradient_accumulation_steps=2 weights change after every second batch, but the moving average takes them
# in after every batch. Four steps of 1 with ema_momentum=0.5 average to 3.125 without accumulation, and to
# 3.34375 with it: the momentum is in effect its square. ema_overwrite_frequency then also writes the
# average into the weights between two steps, so that the second half of a window sees other weights than
# the first. A learning rate schedule counts batches, too: what should last for four steps lasts for two,
# although `optimizer.iterations`, and Adam's correction of its moments, count steps.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet keras==3.15.1 jax==0.10.2 numpy==2.4.6
KERAS_BACKEND=jax "$folder/venv/bin/python" -W ignore - <<'PYTHON'
import keras
import numpy as np

assert keras.__version__ == "3.15.1", keras.__version__


def after_each_batch(batches, **how):
    """Return the optimizer, and the weight after each batch; each step adds 1 to it."""
    layers = [keras.Input([1]), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    model = keras.Sequential(layers)
    optimizer = keras.optimizers.SGD(**{"learning_rate": 1.0, "use_ema": True, "ema_momentum": 0.5, **how})
    model.compile(optimizer, loss=lambda y, out: -out)
    weights = []
    for _ in range(batches):
        model.train_on_batch(np.ones((1, 1)), np.ones((1, 1)))
        weights.append(float(model.get_weights()[0][0, 0]))
    return optimizer, weights


def average(optimizer):
    (variable,) = [each for each in optimizer.variables if each.path.endswith("_average")]
    return float(np.asarray(variable).ravel()[0])


one, weights_of_one = after_each_batch(4)
two, weights_of_two = after_each_batch(8, gradient_accumulation_steps=2)
print(f"4 steps: weights {weights_of_one}, average {average(one)}")
print(f"4 steps of 2 batches: weights {weights_of_two}, average {average(two)}")
assert weights_of_one == [1, 2, 3, 4] and weights_of_two == [0, 1, 1, 2, 2, 3, 3, 4], "changed: steps"
assert int(one.iterations) == int(two.iterations) == 4, "changed: iterations"
assert average(one) == 3.125 and average(two) == 3.34375, "changed: averages"

_, weights = after_each_batch(8, gradient_accumulation_steps=2, ema_overwrite_frequency=2)
print(f"4 steps of 2 batches, overwritten every 2 steps: weights {weights}")
assert weights == [0, 1, 1, 1.5, 1.5, 2.5, 2.25, 2.75], "changed: overwritten weights"

# The rate is 1 for iterations 0 to 2, then 0.
drop = keras.optimizers.schedules.PiecewiseConstantDecay([2], [1.0, 0.0])
_, weights_of_one = after_each_batch(4, learning_rate=drop, use_ema=False)
_, weights_of_two = after_each_batch(8, learning_rate=drop, use_ema=False, gradient_accumulation_steps=2)
print(f"rate 1 for 3 steps: weights {weights_of_one}; in steps of 2 batches {weights_of_two}")
assert weights_of_one == [1, 2, 3, 3], "changed: schedule of steps"
assert weights_of_two == [0, 1, 1, 1, 1, 1, 1, 1], "changed: schedule of batches"
PYTHON
