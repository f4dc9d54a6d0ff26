"""Dense gradients of one step, reduced together in memory that the engine reduces fastest."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.config import DEFAULT_BUCKET_BYTES
from hvdtrain.core import context
from hvdtrain.core.channel import Channel
from hvdtrain.core.collectives.memory import Memory
from hvdtrain.core.collectives.step import STEP, Step, StepState
from hvdtrain.core.plan import ParameterSpec, make_plan
from hvdtrain.core.process_set import ProcessSet
from hvdtrain.core.reducer import agree_on_bucket_size, agree_on_plan
from hvdtrain.core.request import Request, Zeros
from hvdtrain.engines.communicator import Communicator
from hvdtrain.errors import MismatchError
from hvdtrain.tensors.arrays.lending import LentMemory
from hvdtrain.tensors.arrays.memory import ALIGNMENT_BYTES, Array, empty, wire_type
from hvdtrain.types import DType, ReduceOp

__all__ = ["FusedSettings", "reduce_fused"]

# How many sets of gradients get memory of the engine's, which is there until shutdown(), and how
# many are kept with those: a search through models has many, one after the other.
_MOST_IN_ENGINE, _MOST_KEPT = 16, 32

# From there on a gradient does not stay in the caches until it is reduced.
_LARGE_BYTES = 256 << 10

# Buckets begin on lines of the cache, which two of them never share.
_BUCKET_BYTES = 128


@dataclass(frozen=True)
class FusedSettings:
    """How gradients are reduced.

    Attributes:
        op: AVERAGE or SUM.
        process_set: the ranks that take part.
        predivide: the average is (1/predivide before, predivide/size after) the sum.
        groups: indices of gradients that are reduced together.
    """

    op: ReduceOp
    process_set: ProcessSet
    predivide: float = 1.0
    groups: tuple[tuple[int, ...], ...] = ()


def reduce_fused(
    arrays: Sequence[Array], name: str, settings: FusedSettings, weight: float | None = None
) -> list[Array]:
    """Return the reduced gradients (collective, blocking).

    They lie in memory that is used again only when nothing shows it any more.

    Args:
        arrays: this rank's gradients.
        name: of the operation.
        settings: equal on all ranks.
        weight: what this rank counts in the average, samples for example; None for 1.

    Raises:
        MismatchError: the ranks have other gradients, by number, shape or type.
    """
    specs = _specs(arrays)
    channel = settings.process_set.channel()
    known = context.current().kept.setdefault(channel, {})
    key: Hashable = (tuple(specs), settings)
    fused: _Fused = known.get(key) or _Fused(specs, settings)
    try:
        results = fused.reduce(arrays, name, channel, weight)
    except MismatchError:
        agree_on_plan(specs, channel)  # which names the first difference, if it is one of these
        raise
    # A rank that has joined keeps nothing, so where one has, all will ask again.
    in_engine = len(known) < _MOST_IN_ENGINE
    if key not in known and (not in_engine or fused.use_engine_memory(channel)):
        known[key] = fused
        if len(known) > _MOST_KEPT:
            del known[next(islice(known, _MOST_IN_ENGINE, None))]
    return results


def _specs(arrays: Sequence[Array]) -> list[ParameterSpec]:
    # Positions for names: those of TensorFlow's variables count what else a rank has made.
    return [
        ParameterSpec(
            name=f"gradient {number}",
            shape=array.shape,
            strides=array.strides,
            dtype=DType(wire_type(array.dtype).name),
            kind=array.dtype.name,
            device="cpu",
        )
        for number, array in enumerate(arrays)
    ]


def _bucket_bytes(channel: Channel) -> int:
    try:
        return agree_on_bucket_size(channel).nbytes
    except MismatchError:  # a rank has joined, which takes part in steps only
        return DEFAULT_BUCKET_BYTES


class _Fused:
    """Reduces gradients of certain shapes and types.

    All ranks do this for the first time, or none: what is agreed on covers shapes and types.
    """

    def __init__(self, specs: Sequence[ParameterSpec], settings: FusedSettings) -> None:
        # A plan goes backwards. Those of odd lengths come last in it, so that all others begin
        # where TensorFlow takes them as they are.
        aligned = [spec.nbytes % ALIGNMENT_BYTES == 0 for spec in specs]
        self._order = sorted(range(len(specs)), key=aligned.__getitem__)
        place = {index: number for number, index in enumerate(self._order)}
        groups = [[place[index] for index in group] for group in settings.groups]
        ordered = [specs[index] for index in self._order]
        limit = _bucket_bytes(settings.process_set.channel())
        self._plan = make_plan(ordered, limit, limit, groups)
        self._op, self._predivide = settings.op, settings.predivide
        self._digest = self._plan.digest
        buckets = ((bucket.count, bucket.dtype) for bucket in self._plan.buckets)
        kinds = (*buckets, (0, DType.INT32))  # of the numbers that a step adds up: none
        self._zeros = Zeros(kinds, self._op, postscale=self._predivide)
        self._nbytes = sum(spec.nbytes + _BUCKET_BYTES for spec in specs)
        self._memory = LentMemory(empty([self._nbytes], np.uint8))

    def use_engine_memory(self, channel: Channel) -> bool:
        """Let further gradients lie in memory that the engine reduces fastest (collective).

        Tell whether all ranks were there for it.
        """
        try:
            memory = channel.run(Memory(self._nbytes, f"for plan {self._digest}"))
        except MismatchError:  # a rank has joined
            return False
        self._memory = LentMemory(memory)
        return True

    def reduce(
        self, arrays: Sequence[Array], name: str, channel: Channel, weight: float | None
    ) -> list[Array]:
        """Return the reduced gradients (collective, blocking)."""
        buffers = self._buckets()
        factors = (1.0 / self._predivide, self._predivide)
        numbers = Buffer.from_array(np.empty(0, np.int32))
        state = StepState(buffers, numbers, self._op, weight, *factors)
        details = (("op", self._op.value), ("predivide", repr(factors)), ("plan", self._digest))
        step = Step(state, Request(STEP, name, details, self._zeros))
        if channel.has_thread:  # which reduces the first bucket while the second one is filled
            channel.submit(step, at_once=True)
        try:
            results = self._fill(arrays, state, channel.communicator)
        except BaseException:  # Ctrl-C, for example
            step.abandon()  # for which the channel's thread would wait
            raise
        with context.current().blocked.running():
            if channel.has_thread:
                channel.wait(step)
            else:
                channel.run(step)
        return [
            results[index].astype(array.dtype, copy=False) for index, array in enumerate(arrays)
        ]

    def _fill(
        self, arrays: Sequence[Array], state: StepState, communicator: Communicator
    ) -> dict[int, Array]:
        """Copy the gradients into the buckets, and return where each one lies."""
        results = {}
        for bucket, buffer in zip(self._plan.buckets, state.buffers, strict=True):
            elements = buffer.array()
            for number, start in zip(bucket.parameters, bucket.starts, strict=True):
                index = self._order[number]
                array = arrays[index]
                view = elements[start : start + array.size].reshape(array.shape)
                if view.dtype == array.dtype and view.nbytes >= _LARGE_BYTES:
                    whole = np.ascontiguousarray(array)
                    communicator.put(Buffer.from_array(whole), Buffer.from_array(view))
                else:
                    np.copyto(view, array, casting="unsafe")
                results[index] = view
            state.launch()
        return results

    def _buckets(self) -> list[Buffer]:
        memory, buffers, start = self._memory.lend(), [], 0
        for bucket in self._plan.buckets:
            nbytes = bucket.count * bucket.dtype.itemsize
            elements = memory[start : start + nbytes].view(bucket.dtype.numpy)
            buffers.append(Buffer.from_array(elements, bucket.dtype))
            start += -(-nbytes // _BUCKET_BYTES) * _BUCKET_BYTES
        return buffers
