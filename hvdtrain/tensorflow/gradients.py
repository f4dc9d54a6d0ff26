"""The reduction of gradients of TensorFlow variables over the ranks.

They may be dense on one rank, and sparse or None on another: all ranks reduce them in one way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.arrays import HostArray
from hvdtrain.collective import collective
from hvdtrain.core.arrays.fused import (
    DENSE,
    NONE,
    SPARSE,
    Layout,
    LayoutsDifferError,
    ReduceArrays,
    exchange_fused,
    is_overwritten,
)
from hvdtrain.core.compression import Compressor
from hvdtrain.core.gradient_settings import GradientSettings, Groups, choose_exchange
from hvdtrain.core.gradients.step_info import OwnStep
from hvdtrain.core.process_set import ProcessSet, stays_alone
from hvdtrain.errors import UnsupportedError
from hvdtrain.tensorflow.allocator import find_library
from hvdtrain.tensorflow.compression import Compression
from hvdtrain.tensorflow.differentiable import size_as
from hvdtrain.tensorflow.graph import Gradient, Variable, call_on_arrays, weight_sums
from hvdtrain.tensorflow.operations import grouped_allreduce
from hvdtrain.types import ReduceOp


def as_dense(gradients: Sequence[Gradient]) -> list[Gradient]:
    """Return gradients of which none is sparse."""
    return [tf.convert_to_tensor(g) if _kind(g) == SPARSE else g for g in gradients]


@dataclass(frozen=True)
class _LayoutReduction:
    variables: Sequence[Any]
    exchange: ReduceArrays
    settings: GradientSettings
    name: str
    weight: tf.Tensor | None
    compressor: type[Compressor]

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
            how = self.settings
            summed = grouped_allreduce(
                weighted, op=how.total, process_set=how.process_set, name=f"{self.name}_slices"
            )
            return [(each.values, each.indices) for each in summed]

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
            results = [*tensors]
            if slices:
                results += [tf.TensorSpec([], tf.bool), tf.TensorSpec([], tf.float64)]
                results += [tf.TensorSpec([None, *s.shape[1:]], s.dtype) for s in slices.values()]
            outputs = call_on_arrays(function, inputs, results, self.name)

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

            return outputs if results else [], gradient

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
            reduced, factor = self.exchange(own, layout, key, weight)
        except LayoutsDifferError as differ:
            agreed = differ.agreed(self._names, self.name)
            if not layout.fixed:
                raise
            tables = [_table(*parts[n : n + 3]) for n in range(0, len(parts), 3)]
            found = dict(zip([*layout.dense, *sparse], [*own, *tables], strict=True))
            together, factor = self.exchange([found[i] for i in agreed.dense], agreed, key, weight)
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


@collective
def reduce_layouts(
    gradients: Sequence[Gradient],
    variables: Sequence[Any],
    exchange: ReduceArrays,
    settings: GradientSettings,
    name: str,
    samples: Any = None,
    compressor: type[Compressor] = Compression.none,
) -> list[Gradient]:
    """Reduce gradients, whatever their layout is on other ranks."""
    weight = None if samples is None else tf.cast(samples, tf.float64)
    return _LayoutReduction(variables, exchange, settings, name, weight, compressor)(gradients)


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
    table: HostArray = np.zeros(shape, values.dtype)
    np.add.at(table, indices, values)
    return table


def _all_rows(table: tf.Tensor, like: tf.IndexedSlices) -> tf.IndexedSlices:
    return tf.IndexedSlices(table, tf.range(tf.shape(table, tf.int64)[0]), like.dense_shape)


def _rows_if(mixed: tf.Tensor, table: tf.Tensor, own: tf.IndexedSlices) -> tf.Tensor:
    """Return the rows of slices that went into a reduced table, else zeros."""
    return tf.cond(mixed, lambda: tf.gather(table, own.indices), lambda: tf.zeros_like(own.values))


_FUSED = (ReduceOp.AVERAGE, ReduceOp.SUM)


class VariableReduction:
    """Reduces the gradients of variables, except those that are kept local."""

    def __init__(
        self,
        name: str,
        op: ReduceOp,
        process_set: ProcessSet,
        compression: type[Compressor],
        sparse_as_dense: bool,
        predivide: float,
        groups: Groups,
        scale_local: bool,
    ) -> None:
        kind = Compression.name_of(compression) if op in _FUSED else "own"
        exchange = choose_exchange(None, op, predivide, kind) if op in _FUSED else None
        self.compressor = compression if kind == "own" else Compression.none
        self.settings = GradientSettings(
            op, process_set, predivide, groups, sparse_as_dense, exchange, find_library
        )
        self._name, self._scale_local = name, scale_local
        self._local: dict[int, Variable] = {}

    def add_local(self, variable: Variable) -> None:
        """Do not reduce the gradient of a variable."""
        self._local[id(variable)] = variable  # kept, so that no other object gets its id

    def is_local(self, variable: Variable) -> bool:
        return id(variable) in self._local

    @collective
    def __call__(
        self, gradients: Sequence[Gradient], variables: Sequence[Variable]
    ) -> list[Gradient]:
        """Reduce gradients over the ranks; None counts as zero if any has one."""
        process_set, compressor = self.settings.process_set, self.compressor
        if not process_set.included():
            return list(gradients)
        results, alone = list(gradients), stays_alone(process_set)
        if not alone:
            for index, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
                if self._scale_local and self.is_local(variable) and not is_overwritten(variable):
                    results[index] = _divided(gradient, process_set)
        shared = [i for i, variable in enumerate(variables) if not self.is_local(variable)]
        own, theirs = [results[i] for i in shared], [variables[i] for i in shared]
        if self.settings.sparse_as_dense:
            own = as_dense(own)
        if alone:  # as a reduction over one rank gives them
            own = [
                compressor.decompress(*compressor.compress(g)) if _kind(g) == DENSE else g
                for g in own
            ]
        elif self.settings.op not in _FUSED:
            own = self._reduce_otherwise(own, theirs)
        elif own:
            settings = self.settings

            @collective
            def exchange(
                arrays: Sequence[HostArray], layout: Layout, key: str | None, weight: float | None
            ) -> tuple[list[HostArray], float]:
                owners, name = [theirs[i] for i in layout.dense], key or self._name
                sums, step = partial(weight_sums, owners), OwnStep()
                return exchange_fused(arrays, owners, name, settings, step, layout, sums)[0], 1.0

            own = reduce_layouts(own, theirs, exchange, settings, self._name, compressor=compressor)
        for index, reduced in zip(shared, own, strict=True):
            results[index] = reduced
        return results

    @collective
    def _reduce_otherwise(
        self, gradients: Sequence[Gradient], variables: Sequence[Variable]
    ) -> list[Gradient]:
        """Reduce gradients by Min, Max, Product or Adasum; all ranks have those of one layout."""
        if any(map(is_overwritten, variables)):
            raise UnsupportedError(
                f"op={self.settings.op}: scales and histories of float8 overwrite their "
                "variables, and are reduced with op=Average and op=Sum only"
            )
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        tensors = [gradients[i] for i in present]
        if len(present) < len(gradients):  # ranks compare shapes: one of them says what is missing
            digest = hashlib.blake2b(repr(present).encode(), digest_size=3).digest()
            tensors.append(tf.zeros([0, int.from_bytes(digest)]))
        reduced = grouped_allreduce(
            tensors,
            op=self.settings.op,
            compression=self.compressor,
            process_set=self.settings.process_set,
            name=self._name,
        )
        results = dict(zip(present, reduced, strict=False))
        return [results.get(index) for index in range(len(gradients))]


def _divided(gradient: Gradient, process_set: ProcessSet) -> Gradient:
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values / size_as(gradient.dtype, process_set)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return None if gradient is None else gradient / size_as(gradient.dtype, process_set)


class LocalAggregation:
    """Sums the gradients of several passes (TensorFlow 1: in local variables), then reduces."""

    def __init__(self, passes: int, average: bool, reduction: VariableReduction) -> None:
        self._passes, self._average, self._reduction = passes, average, reduction
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
        reduced = self._reduction(totals, variables)  # dense, as the sums are
        divisor = self._passes if self._average else 1
        return [g if g is None else g / tf.cast(divisor, g.dtype) for g in reduced]

    def _dense(self, gradient: Gradient) -> tf.Tensor | None:
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        if not self._reduction.settings.sparse_as_dense:
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
