"""A Keras MLP on TensorFlow that is trained in tf.function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import keras
import numpy as np
import tensorflow as tf

INPUTS, CLASSES, BATCH = 1024, 1024, 16
_LR, _MOMENTUM = 0.01, 0.9


@dataclass(frozen=True)
class Library:
    """How a library takes part in a training step. TensorFlow's types are not known to mypy.

    Attributes:
        tape: wraps the tape, before it computes the gradients.
        optimizer: wraps the optimizer.
        run: calls the step, a function of inputs and targets.
        scope: in which the variables are created.
        replicas: divisor of the loss, if the library sums gradients.
    """

    tape: Callable[[Any], Any] = lambda tape: tape
    optimizer: Callable[[Any], Any] = lambda optimizer: optimizer
    run: Callable[[Callable[[Any, Any], Any], Any, Any], Any] = lambda step, *batch: step(*batch)
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext
    replicas: int = 1


class TensorFlowTrainer:
    """Trains an MLP with SGD and momentum on one batch of this rank."""

    def __init__(self, rank: int, hidden: Sequence[int], library: Library) -> None:
        self._widths = (INPUTS, *hidden, CLASSES)
        self._library = library
        random = np.random.default_rng(rank)
        self._inputs = random.normal(size=(BATCH, INPUTS)).astype(np.float32)
        self._targets = random.integers(CLASSES, size=BATCH)
        self._variables: list[Any] = []

    def restart(self) -> None:
        """Return to the first weights and to an optimizer without momentum (local)."""
        if not self._variables:
            self._build()
        for variable, array in zip(self._variables, _first_weights(self._widths), strict=True):
            variable.assign(array)
        for variable in self._optimizer.variables:
            if len(variable.shape):  # neither a rate nor a number of steps
                variable.assign(np.zeros(variable.shape, np.float32))

    def step(self) -> None:
        """Take a step, and wait for its loss."""
        self._step(*self._batch).numpy()

    def moved(self) -> float:
        """Return the sum of the absolute changes of all weights."""
        return sum(
            float(np.abs(variable.numpy() - array).sum(dtype=np.float64))
            for variable, array in zip(self._variables, _first_weights(self._widths), strict=True)
        )

    def _build(self) -> None:
        library = self._library
        self._batch = tf.constant(self._inputs), tf.constant(self._targets)
        with library.scope():
            model = _mlp(self._widths)
            optimizer = library.optimizer(keras.optimizers.SGD(_LR, momentum=_MOMENTUM))
            optimizer.build(model.trainable_variables)
        self._variables, self._optimizer = model.trainable_variables, optimizer

        def step(inputs: Any, targets: Any) -> Any:
            with tf.GradientTape() as tape:
                logits = model(inputs, training=True)
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits)
                loss = tf.reduce_mean(losses) / library.replicas
            # Horovod's tape does not take variables of Keras.
            own = [variable.value for variable in model.trainable_variables]
            gradients = library.tape(tape).gradient(loss, own)
            optimizer.apply(gradients, model.trainable_variables)
            return loss

        def run(inputs: Any, targets: Any) -> Any:
            return library.run(step, inputs, targets)

        self._step = tf.function(run, autograph=False)


def _mlp(widths: Sequence[int]) -> Any:
    layers = keras.layers
    hidden = [layers.Dense(width, activation="relu") for width in widths[1:-1]]
    return keras.Sequential([keras.Input([widths[0]]), *hidden, layers.Dense(widths[-1])])


def _first_weights(widths: Sequence[int]) -> list[Any]:
    random = np.random.default_rng(0)
    arrays: list[Any] = []
    for width, following in pairwise(widths):
        spread = np.float32(np.sqrt(2 / width))
        arrays.append(random.standard_normal((width, following), np.float32) * spread)
        arrays.append(np.zeros(following, np.float32))
    return arrays
