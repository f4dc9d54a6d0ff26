"""Gradients of TensorFlow, dense here and sparse or None there, reduced in one way on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from hvdtrain.arrays import HostArray
from hvdtrain.collective import collective
from hvdtrain.core.arrays.layouts import DENSE, NONE, SPARSE, Layout, LayoutsDifferError
from hvdtrain.core.compression import Compressor
from hvdtrain.tensorflow.compression import Compression
from hvdtrain.tensorflow.graph import Gradient, call_on_arrays

# Takes the dense gradients of a layout, the operation's name in a graph, and this rank's weight.
# Returns the reduced gradients, and the factor for this rank's slices.
ReduceArrays: TypeAlias = (
    "Callable[[Sequence[HostArray], Layout, str | None, float | None], "
    "tuple[Sequence[HostArray], float]]"
)


def as_dense(gradients: Sequence[Gradient]) -> list[Gradient]:
    """Return gradients of which none is sparse."""
    return [tf.convert_to_tensor(g) if _kind(g) == SPARSE else g for g in gradients]


@dataclass(frozen=True)
class LayoutReduction:
    """Reduces gradients, whatever their layout is on other ranks."""

    variables: Sequence[Any]
    name: str
    reduce: ReduceArrays
    gather: Callable[[Sequence[tf.IndexedSlices]], Sequence[tf.IndexedSlices]]
    weight: tf.Tensor | None = None
    compressor: type[Compressor] = Compression.none

    @collective
    def __call__(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Reduce this rank's gradients.

        In eager mode the result is None where no rank has a gradient, and sparse where all that
        have one have it so; in a graph it is of the kind that it is here.
        """
        layout = Layout("".join(map(_kind, gradients)), not tf.executing_eagerly())
        try:
            return self._reduced(gradients, layout)
        except LayoutsDifferError as differ:  # in eager mode
            layout = differ.agreed(self._names, self.name)
        rows = zip(gradients, layout.kinds, self.variables, strict=True)
        return self._reduced([_converted(*row) for row in rows], layout)

    @property
    def _names(self) -> list[str]:
        # Tensors in eager mode have no name, and names of variables may differ between ranks.
        return [f"gradient {number}" for number in range(len(self.variables))]

    @collective
    def _reduced(self, gradients: Sequence[Gradient], layout: Layout) -> list[Gradient]:
        """Reduce gradients of a layout that other ranks should have, too."""
        dense, sparse = layout.dense, [i for i, g in enumerate(gradients) if _kind(g) == SPARSE]
        pairs = [self.compressor.compress(tf.convert_to_tensor(gradients[i])) for i in dense]
        slices = {i: _with_defaults(gradients[i], self.variables[i]) for i in sparse}
        reduced, instead = self._reduce_dense([tensor for tensor, _ in pairs], slices, layout)
        results: dict[int, Gradient] = dict.fromkeys(range(len(gradients)))
        for index, tensor, (_, ctx) in zip(dense, reduced, pairs, strict=True):
            results[index] = self.compressor.decompress(tensor, ctx)
        if sparse:
            results |= zip(sparse, self._gathered(slices, layout, *instead), strict=True)
        return list(results.values())

    def _gathered(
        self,
        slices: dict[int, tf.IndexedSlices],
        layout: Layout,
        mixed: tf.Tensor,
        factor: tf.Tensor,
        *tables: tf.Tensor,
    ) -> list[tf.IndexedSlices]:
        """Reduce slices, or return all rows of the reduced tables if they are dense elsewhere."""
        own = list(slices.values())

        def gathered() -> list[tuple[tf.Tensor, tf.Tensor]]:
            # Also where this rank counts 1, since others may have a weight.
            weight = tf.stop_gradient(factor)
            weighted = [
                tf.IndexedSlices(s.values * tf.cast(weight, s.dtype), s.indices, s.dense_shape)
                for s in own
            ]
            return [(each.values, each.indices) for each in self.gather(weighted)]

        def rows() -> list[tuple[tf.Tensor, tf.Tensor]]:
            all_rows = [_all_rows(*each) for each in zip(tables, own, strict=True)]
            return [(each.values, each.indices) for each in all_rows]

        pairs = tf.cond(mixed, rows, gathered) if layout.fixed else gathered()
        return [
            tf.IndexedSlices(values, indices, each.dense_shape)
            for each, (values, indices) in zip(own, pairs, strict=True)
        ]

    @collective
    def _reduce_dense(
        self, tensors: Sequence[tf.Tensor], slices: dict[int, tf.IndexedSlices], layout: Layout
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Reduce dense gradients as one operation, which can be differentiated."""
        count = len(tensors)
        passed = slices.values() if layout.fixed else []
        parts = [part for s in passed for part in (s.values, s.indices, s.dense_shape)]
        inputs = [*tensors, *parts]
        if self.weight is not None:
            inputs.append(self.weight)

        def function(arrays: Sequence[HostArray], key: str | None) -> list[HostArray]:
            weight = None if self.weight is None else float(arrays[-1])
            given = list(arrays[count : count + len(parts)])
            return self._answer(list(arrays[:count]), given, list(slices), layout, key, weight)

        def operation(*inputs: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
            dtypes, shapes = [t.dtype for t in tensors], [t.shape for t in tensors]
            if slices:
                dtypes += [tf.bool, tf.float64, *(each.dtype for each in slices.values())]
                shapes += [[], [], *([None, *s.shape[1:]] for s in slices.values())]
            outputs = call_on_arrays(function, list(inputs), dtypes, shapes, self.name)

            def gradient(*upstream: tf.Tensor) -> Any:  # of a penalty on gradients, for example
                given = [tf.convert_to_tensor(each) for each in upstream]
                tables = dict(zip(slices, given[count + 2 :], strict=True)) if parts else {}
                rows = {i: _all_rows(table, slices[i]) for i, table in tables.items()}
                reduced, instead = self._reduce_dense(given[:count], rows, layout)
                back: list[tf.Tensor | None] = [*reduced]
                for own, table in zip(slices.values(), instead[2:], strict=False):
                    back += [_rows_if(instead[0], table, own), None, None]
                back += [None] * (len(inputs) - len(back))
                return back if len(back) > 1 else back[0]

            return outputs if dtypes else [], gradient

        outputs = tf.custom_gradient(operation)(*inputs) if inputs else operation()[0]
        return outputs[:count], outputs[count:]

    def _answer(
        self,
        own: list[HostArray],
        parts: list[HostArray],
        sparse: Sequence[int],
        layout: Layout,
        key: str | None,
        weight: float | None,
    ) -> list[HostArray]:
        """Reduce arrays; in a graph with those of slices if they are dense on other ranks."""
        try:
            reduced, factor = self.reduce(own, layout, key, weight)
        except LayoutsDifferError as differ:
            agreed = differ.agreed(self._names, self.name)
            if not layout.fixed:
                raise
            tables = [_table(*parts[n : n + 3]) for n in range(0, len(parts), 3)]
            found = dict(zip([*layout.dense, *sparse], [*own, *tables], strict=True))
            together, factor = self.reduce([found[i] for i in agreed.dense], agreed, key, weight)
            found |= zip(agreed.dense, together, strict=True)
            reduced, tables = [found[i] for i in layout.dense], [found[i] for i in sparse]
            mixed = True
        else:
            # Of as many dimensions as values have, which eager mode does not pass.
            tables = [np.zeros_like(values[:0]) for values in parts[::3]]
            tables += [np.zeros([0], np.float32)] * (len(sparse) - len(tables))
            mixed = False
        if not sparse:
            return list(reduced)
        instead: list[HostArray] = [np.array(mixed), np.array(factor, np.float64), *tables]
        return [*reduced, *instead]


def _kind(gradient: Gradient) -> str:
    if gradient is None:
        return NONE
    return SPARSE if isinstance(gradient, tf.IndexedSlices) else DENSE


def _converted(gradient: Gradient, kind: str, variable: Any) -> Gradient:
    if kind == DENSE and gradient is None:
        return tf.zeros(variable.shape, variable.dtype)
    if kind == SPARSE and gradient is None:
        nothing = tf.zeros([0, *variable.shape[1:]], variable.dtype)
        return tf.IndexedSlices(nothing, tf.zeros([0], tf.int64), tf.constant(variable.shape))
    return tf.convert_to_tensor(gradient) if kind == DENSE else gradient


def _with_defaults(slices: tf.IndexedSlices, variable: Any) -> tf.IndexedSlices:
    """Return slices with indices of int64, whatever those of other ranks are, and a shape."""
    shape = tf.constant(variable.shape) if slices.dense_shape is None else slices.dense_shape
    return tf.IndexedSlices(slices.values, tf.cast(slices.indices, tf.int64), shape)


def _table(values: HostArray, indices: HostArray, shape: HostArray) -> HostArray:
    """Return slices as a dense array."""
    table: HostArray = np.zeros(shape, values.dtype)
    np.add.at(table, indices, values)
    return table


def _all_rows(table: tf.Tensor, like: tf.IndexedSlices) -> tf.IndexedSlices:
    return tf.IndexedSlices(table, tf.range(tf.shape(table, tf.int64)[0]), like.dense_shape)


def _rows_if(mixed: tf.Tensor, table: tf.Tensor, own: tf.IndexedSlices) -> tf.Tensor:
    """Return the rows of slices that went into a reduced table, else zeros."""
    return tf.cond(mixed, lambda: tf.gather(table, own.indices), lambda: tf.zeros_like(own.values))
