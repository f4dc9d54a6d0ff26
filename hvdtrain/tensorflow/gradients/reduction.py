"""The reduction of gradients of TensorFlow variables over the ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import tensorflow as tf

from hvdtrain.arrays import HostArray
from hvdtrain.collective import collective
from hvdtrain.core.arguments import GradientSettings, Groups, choose_exchange
from hvdtrain.core.arrays.fused import reduce_fused
from hvdtrain.core.arrays.layouts import Layout
from hvdtrain.core.compression import Compressor
from hvdtrain.core.process_set import ProcessSet, stays_alone
from hvdtrain.tensorflow.allocator import find_library
from hvdtrain.tensorflow.compression import Compression
from hvdtrain.tensorflow.gradients.layouts import LayoutReduction, as_dense
from hvdtrain.tensorflow.graph import Gradient, Variable, weight_sums
from hvdtrain.tensorflow.operations.differentiable import size_as
from hvdtrain.tensorflow.operations.ops import grouped_allreduce
from hvdtrain.types import ReduceOp


class LocalAggregation:
    """Sums the gradients of several passes (TensorFlow 1: in local variables), then reduces."""

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


_FUSED = (ReduceOp.AVERAGE, ReduceOp.SUM)


@dataclass(frozen=True)
class VariableSettings(GradientSettings):
    """How gradients of TensorFlow variables are reduced."""

    compressor: type[Compressor] = Compression.none

    @classmethod
    def of(
        cls,
        op: ReduceOp,
        process_set: ProcessSet,
        compression: type[Compressor],
        sparse_as_dense: bool,
        predivide: float,
        groups: Groups,
    ) -> VariableSettings:
        """Return the settings for arguments of the user."""
        kind = Compression.name_of(compression) if op in _FUSED else "own"
        exchange = choose_exchange(None, op, predivide, kind) if op in _FUSED else None
        compressor = compression if kind == "own" else Compression.none
        return cls(
            *(op, process_set, predivide, groups, sparse_as_dense, exchange),
            find_library,
            compressor,
        )


class LocalVariables:
    """Variables whose gradients are not reduced."""

    def __init__(self, scale: bool) -> None:
        self._scale = scale
        self._by_id: dict[int, Variable] = {}

    def add(self, variable: Variable) -> None:
        """Do not reduce the gradient of a variable."""
        self._by_id[id(variable)] = variable  # kept, so that no other object gets its id

    def __contains__(self, variable: object) -> bool:
        return id(variable) in self._by_id

    def scaled(self, gradient: Gradient, process_set: ProcessSet) -> Gradient:
        """Return the gradient of a local variable, scaled if that was asked for."""
        if gradient is None or not self._scale:
            return gradient
        if isinstance(gradient, tf.IndexedSlices):
            values = gradient.values / size_as(gradient.dtype, process_set)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return gradient / size_as(gradient.dtype, process_set)


@collective
def reduce_gradients(
    gradients: Sequence[Gradient],
    variables: Sequence[Variable],
    settings: VariableSettings,
    local: LocalVariables,
    name: str,
) -> list[Gradient]:
    """Reduce gradients over the ranks; None counts as zero if any has one."""
    process_set = settings.process_set
    if not process_set.included():
        return list(gradients)
    results, alone = list(gradients), stays_alone(process_set)
    if not alone:
        for index, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if variable in local:
                results[index] = local.scaled(gradient, process_set)
    shared = [i for i, variable in enumerate(variables) if variable not in local]
    own, theirs = [results[i] for i in shared], [variables[i] for i in shared]
    if settings.sparse_as_dense:
        own = as_dense(own)
    if alone:
        own = [_as_sent(gradient, settings.compressor) for gradient in own]
    elif settings.op not in _FUSED:
        own = _reduce_otherwise(own, settings, name)
    elif own:
        own = _reduce_fused(own, theirs, settings, name)
    for index, reduced in zip(shared, own, strict=True):
        results[index] = reduced
    return results


def _as_sent(gradient: Gradient, compressor: type[Compressor]) -> Gradient:
    """Return a gradient as a reduction over one rank gives it."""
    if gradient is None or isinstance(gradient, tf.IndexedSlices):
        return gradient
    return compressor.decompress(*compressor.compress(gradient))


@collective
def _reduce_otherwise(
    gradients: Sequence[Gradient], settings: VariableSettings, name: str
) -> list[Gradient]:
    """Reduce gradients by Min, Max, Product or Adasum; all ranks have those of one layout."""
    present = [i for i, gradient in enumerate(gradients) if gradient is not None]
    tensors = [gradients[i] for i in present]
    if len(present) < len(gradients):  # ranks compare shapes: one of them says what is missing
        digest = hashlib.blake2b(repr(present).encode(), digest_size=3).digest()
        tensors.append(tf.zeros([0, int.from_bytes(digest)]))
    reduced = grouped_allreduce(
        tensors,
        op=settings.op,
        compression=settings.compressor,
        process_set=settings.process_set,
        name=name,
    )
    results = dict(zip(present, reduced, strict=False))
    return [results.get(index) for index in range(len(gradients))]


@collective
def _reduce_fused(
    gradients: Sequence[Gradient],
    variables: Sequence[Variable],
    settings: VariableSettings,
    name: str,
) -> list[Gradient]:
    """Reduce gradients by Average or Sum."""

    def reduce(
        arrays: Sequence[HostArray], layout: Layout, key: str | None, weight: float | None
    ) -> tuple[list[HostArray], float]:
        owners = [variables[i] for i in layout.dense]
        weights = partial(weight_sums, owners)
        reduced = reduce_fused(arrays, owners, key or name, settings, None, layout, weights)
        return reduced, 1.0

    def gather(slices: Sequence[tf.IndexedSlices]) -> list[tf.IndexedSlices]:
        process_set, slices_name = settings.process_set, f"{name}_slices"
        return grouped_allreduce(
            slices, op=settings.total, process_set=process_set, name=slices_name
        )

    reduction = LayoutReduction(variables, name, reduce, gather, compressor=settings.compressor)
    return reduction(gradients)
