"""Gradients that are added up on a rank before they are reduced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

__all__ = ["LocalAggregation"]


class LocalAggregation:
    """Adds up the gradients of some passes, and reduces the sum after the last of them.

    Its variables are local ones in a graph of TensorFlow 1.

    Args:
        passes: how many.
        average: divide the reduced sum by their number.
        sparse_as_dense: make tf.IndexedSlices dense; without it they are refused.
        reduce: reduces gradients of variables.
    """

    def __init__(
        self,
        passes: int,
        average: bool,
        sparse_as_dense: bool,
        reduce: Callable[[Sequence[Any], Sequence[Any]], list[Any]],
    ) -> None:
        self._passes, self._average = passes, average
        self._sparse_as_dense, self._reduce = sparse_as_dense, reduce
        self._counter: Any = None
        self._present: list[int] = []
        self._sums: list[Any] = []

    def add(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return reduced gradients after the last pass, and this pass's own before (collective).

        Raises:
            ValueError: a gradient is sparse, or others are None than in the first pass.
        """
        given = [self._dense(g) for g in gradients]
        present = [i for i, gradient in enumerate(given) if gradient is not None]
        if self._counter is None:
            self._counter, self._present = _zeros([], tf.int32), present
            self._sums = [_zeros(given[i].shape, given[i].dtype) for i in present]
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
            owners = [variables[i] for i in present]
            results = tf.cond(
                self.complete(),
                lambda: tuple(self._reduced(owners)),
                lambda: tuple(tf.identity(given[i]) for i in present),
            )
        results = dict(zip(present, results, strict=True))
        return [results.get(i) for i in range(len(given))]

    def complete(self) -> Any:
        """Return whether the last call of add() ended with a reduction, bool []."""
        return tf.equal(tf.identity(self._counter), 0)

    def _reduced(self, variables: Sequence[Any]) -> list[Any]:
        totals = [tf.identity(total) for total in self._sums]
        reduced = self._reduce(totals, variables)
        divisor = self._passes if self._average else 1
        return [gradient / tf.cast(divisor, gradient.dtype) for gradient in reduced]

    def _dense(self, gradient: Any) -> Any:
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        if not self._sparse_as_dense:
            raise ValueError(
                "tf.IndexedSlices do not go with backward_passes_per_step > 1: use "
                "sparse_as_dense=True"
            )
        return tf.convert_to_tensor(gradient)


def _zeros(shape: Any, dtype: Any) -> Any:
    if tf.executing_eagerly() or tf.inside_function():
        with tf.init_scope():
            return tf.Variable(tf.zeros(shape, dtype), trainable=False)
    collections = [tf.compat.v1.GraphKeys.LOCAL_VARIABLES]
    return tf.compat.v1.Variable(
        tf.zeros(shape, dtype), trainable=False, collections=collections, use_resource=True
    )
