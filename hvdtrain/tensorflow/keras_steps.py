"""Steps of Keras's optimizers on TensorFlow in fewer passes over memory, with the same bits."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from hvdtrain.config import Config
from hvdtrain.tensorflow.graph import Variable, do_not_convert

_raw, _ops = tf.raw_ops, keras.ops
Step = Callable[[Any, Any, Variable, Any], None]


def _sgd(optimizer: Any, gradient: tf.Tensor, variable: Variable, learning_rate: Any) -> None:
    rate, gradient = _ops.cast(learning_rate, variable.dtype), _ops.cast(gradient, variable.dtype)
    if optimizer.momentum == 0:
        _raw.ResourceApplyGradientDescent(var=variable.handle, alpha=rate, delta=gradient)
        return
    _raw.ResourceApplyKerasMomentum(
        var=variable.handle,
        accum=optimizer.momentums[optimizer._get_variable_index(variable)].value.handle,
        lr=rate,
        grad=gradient,
        momentum=_ops.cast(optimizer.momentum, variable.dtype),
        use_nesterov=optimizer.nesterov,
    )


def _adam(optimizer: Any, gradient: tf.Tensor, variable: Variable, learning_rate: Any) -> None:
    kind, index = variable.dtype, optimizer._get_variable_index(variable)
    rate, gradient = _ops.cast(learning_rate, kind), _ops.cast(gradient, kind)
    steps = _ops.cast(optimizer.iterations + 1, kind)
    betas = optimizer.beta_1, optimizer.beta_2
    powers = [_ops.power(_ops.cast(beta, kind), steps) for beta in betas]
    first, second = optimizer._momentums[index].value, optimizer._velocities[index].value
    # Those of TensorFlow for Adam round 1 - beta in another way.
    values = gradient, tf.square(gradient)
    for mean, value, beta in zip((first, second), values, betas, strict=True):
        negative = tf.convert_to_tensor(beta - 1, kind)
        _raw.ResourceApplyGradientDescent(var=mean.handle, alpha=negative, delta=value - mean)
    if optimizer.amsgrad:
        largest = optimizer._velocity_hats[index].value
        largest.assign(tf.maximum(largest, second))
        second = largest
    _raw.ResourceApplyAdagradV2(  # w -= rate m / (sqrt(v) + epsilon)
        var=variable.handle,
        accum=second.handle,
        lr=rate * _ops.sqrt(1 - powers[1]) / (1 - powers[0]),
        epsilon=tf.convert_to_tensor(optimizer.epsilon, kind),
        grad=first,
        update_slots=False,
    )


_OF_ADAM = _adam, ("beta_1", "beta_2", "epsilon", "amsgrad")
_STEPS: Mapping[type, tuple[Step, tuple[str, ...]]] = {
    keras.optimizers.SGD: (_sgd, ("momentum", "nesterov")),
    keras.optimizers.Adam: _OF_ADAM,
    keras.optimizers.AdamW: _OF_ADAM,
}
_COUNT, _TIMES = 64 * 64 + 15, 3


def faster_steps(kind: Any) -> dict[str, Any]:
    """Return the methods for a subclass of an optimizer's class; none if it is not of Keras."""
    if kind not in _STEPS or not Config.from_environ(os.environ).keras_steps:
        return {}
    (step, names), of_keras = _STEPS[kind], kind.update_step

    @do_not_convert
    def update_step(self: Any, gradient: Any, variable: Variable, learning_rate: Any) -> None:
        settings = tuple((name, getattr(self, name, None)) for name in names)
        suits = (
            all(type(value) in (bool, int, float) for _, value in settings)
            and _suits(gradient, variable)
            and _has_same_bits(kind, settings, variable.dtype)
        )
        (step if suits else of_keras)(self, gradient, variable, learning_rate)

    return {"update_step": update_step}


def _suits(gradient: Any, variable: Variable) -> bool:
    return (
        isinstance(gradient, tf.Tensor)
        and isinstance(variable, ResourceVariable)
        and variable.dtype in (tf.float32, tf.float64)
        and gradient.shape == variable.shape
        and "CPU" in variable.device
        and not tf.distribute.has_strategy()
        and not control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())
    )


@cache
def _has_same_bits(kind: Any, settings: tuple[tuple[str, Any], ...], dtype: tf.DType) -> bool:
    """Return whether steps on random numbers are those of Keras, to the bit."""
    # A function that is traced in this thread would note the variables, and may not make any.
    with ThreadPoolExecutor(1) as thread:
        ends = [
            thread.submit(_end_of, step, kind, dict(settings), dtype)
            for step in (kind.update_step, _STEPS[kind][0])
        ]
    try:
        return ends[0].result() == ends[1].result()
    except Exception:  # whatever another Keras may raise
        return False


def _end_of(step: Step, kind: Any, settings: Mapping[str, Any], dtype: tf.DType) -> list[bytes]:
    random = np.random.default_rng(0)
    shape = _TIMES + 1, _COUNT
    drawn = random.normal(size=shape) * np.exp(5 * random.normal(size=shape))
    with tf.device("CPU:0"):
        # Names of their own: Keras would number those that the program makes later.
        optimizer = kind(0.1, name="hvdtrain", **settings)
        variable = keras.Variable(drawn[0], dtype=dtype.name, name="hvdtrain")
        optimizer.build([variable])
        for number, gradient in enumerate(drawn[1:]):
            optimizer._iterations.assign(number)
            given = tf.constant(gradient, dtype)
            step(optimizer, given, variable.value, optimizer.learning_rate)
        return [each.numpy().tobytes() for each in (variable, *optimizer.variables)]
