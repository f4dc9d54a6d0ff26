"""Local gradient aggregation: gradients that a rank adds up before they are reduced."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from hvdtrain.collective import collective
from hvdtrain.tensorflow.tensors.types import Gradient, Variable


class LocalAggregation:
    """Adds up the gradients of several passes and reduces the sum after the last of them.

    In a graph of TensorFlow 1 it keeps them in local variables.
    """

    def __init__(
        self,
        passes: int,
        average: bool,
        sparse_as_dense: bool,
        reduce: Callable[[Sequence[Gradient], Sequence[Variable]], list[Gradient]],
    ) -> None:
        self._passes, self._average = passes, average
        self._sparse_as_dense, self._reduce = sparse_as_dense, reduce
        self._counter: tf.Variable | None = None
        self._present: list[int] = []
        self._sums: list[tf.Variable] = []

    @collective
    def add(self, gradients: Sequence[Gradient], variables: Sequence[Variable]) -> list[Gradient]:
        """Add the gradients of a pass (collective in the last pass)."""
        given: list[tf.Tensor | None] = [self._dense(g) for g in gradients]
        present = [i for i, gradient in enumerate(given) if gradient is not None]
        if self._counter is None:
            self._counter, self._present = _zeros([], tf.int32), present
            self._sums = [_zeros(g.shape, g.dtype) for g in given if g is not None]
        if present != self._present:
            number = min(set(present) ^ set(self._present))
            name = getattr(variables[number], "name", f"number {number}")
            raise ValueError(
                f"backward_passes_per_step > 1: {name} has a gradient in some passes and none in "
                "others: give it one in every pass, or leave the variable out"
            )
        before = tf.identity(self._counter)
        added = [
            total.assign(tf.where(tf.equal(before, 0), given[i], total + given[i]))
            for total, i in zip(self._sums, present, strict=True)
        ]
        with tf.control_dependencies([] if tf.executing_eagerly() else [tf.group(before, *added)]):
            counted = self._counter.assign((before + 1) % self._passes)
        with tf.control_dependencies([] if tf.executing_eagerly() else [tf.group(counted)]):
            complete = self.complete()
            if tf.executing_eagerly():  # other ranks may have gradients that this one has not
                return self._reduced(variables) if complete else given
            results = tf.cond(
                complete,
                lambda: tuple(g for g in self._reduced(variables) if g is not None),
                lambda: tuple(tf.identity(given[i]) for i in present),
            )
        results = dict(zip(present, results, strict=True))
        return [results.get(i) for i in range(len(given))]

    def complete(self) -> tf.Tensor:
        """Return whether the last call of add() reduced the gradients, bool []."""
        return tf.equal(tf.identity(self._counter), 0)

    def _reduced(self, variables: Sequence[Variable]) -> list[tf.Tensor | None]:
        totals: list[tf.Tensor | None] = [None] * len(variables)
        for index, total in zip(self._present, self._sums, strict=True):
            totals[index] = tf.identity(total)
        reduced = self._reduce(totals, variables)  # dense, as the sums are
        divisor = self._passes if self._average else 1
        return [g if g is None else g / tf.cast(divisor, g.dtype) for g in reduced]

    def _dense(self, gradient: Gradient) -> tf.Tensor | None:
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        if not self._sparse_as_dense:
            raise ValueError(
                "tf.IndexedSlices cannot be combined with backward_passes_per_step > 1: use "
                "sparse_as_dense=True"
            )
        return tf.convert_to_tensor(gradient)


def _zeros(shape: tf.TensorShape | list[int], dtype: tf.DType) -> tf.Variable:
    if tf.executing_eagerly() or tf.inside_function():
        with tf.init_scope():
            return tf.Variable(tf.zeros(shape, dtype), trainable=False)
    collections = [tf.compat.v1.GraphKeys.LOCAL_VARIABLES]
    return tf.compat.v1.Variable(
        tf.zeros(shape, dtype), trainable=False, collections=collections, use_resource=True
    )
