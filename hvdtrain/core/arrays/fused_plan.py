"""The plan by which dense gradients that are arrays are reduced in buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hvdtrain.arrays import HostArray
from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core import context
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.allocators.opening import FindLibrary, placing_slices
from hvdtrain.core.arrays.lending import Lending, open_lending
from hvdtrain.core.arrays.memory import MemoryPool, aligned_order, empty
from hvdtrain.core.collectives.memory import AllocateIfWanted
from hvdtrain.core.gradients.communicators import Communicators
from hvdtrain.core.gradients.exchange import Exchange, FilledBucket, StepInfo
from hvdtrain.core.gradients.memory import cut, memory_bytes
from hvdtrain.core.gradients.plan import ParameterSpec, make_plan
from hvdtrain.core.gradients.reducer import Reducer
from hvdtrain.core.places.lent_bucket import LentBucket

# A gradient of this size or more does not stay in the caches until it is reduced.
_LARGE_BYTES = 256 << 10
# TensorFlow computes momenta in the memory of the last results, which they keep for a step.
_LENDING_BLOCKS = 2
_STRIDE = 4096


@dataclass(frozen=True)
class OwnStep:
    """What a rank knows about a step by itself."""

    weight: float | None = None
    number: int | None = None
    flush: bool = False
    local_steps: int = 1


@dataclass(frozen=True)
class _Memory:
    """Memory of the buckets."""

    pool: MemoryPool
    lending: Lending | None = None


class FusedPlan:
    """Reduces gradients of given shapes and dtypes in buckets.

    All ranks use a plan for the first time together: the request that ranks agree on covers shapes
    and dtypes.
    """

    def __init__(
        self,
        specs: Sequence[ParameterSpec],
        groups: Sequence[Sequence[int]],
        exchange: Exchange,
        channel: Channel,
        bucket_bytes: int,
        communicators: Communicators | None = None,
    ) -> None:
        order = aligned_order([spec.nbytes for spec in specs])
        self._plan = make_plan(specs, bucket_bytes, bucket_bytes, groups, order)
        self._exchange, self._communicators = exchange, communicators
        self._exchange.prepare(self._plan)
        self._steps = 0
        self._nbytes = memory_bytes(self._plan).get("cpu", 0)
        self._memory_key = f"plan {self._plan.digest}, {self._exchange.spec}"
        known: _Memory | None = context.current().first_use.find(channel, self._memory_key)
        self._memory = known or _Memory(MemoryPool(empty([self._nbytes], np.uint8)))

    @collective
    def use_engine_memory(
        self, channel: Channel, wanted: Callable[[], bool], allocator: FindLibrary | None
    ) -> bool:
        """Allocate the memory that the engine reduces fastest for later steps.

        That is done once for all plans of the same gradients, whatever thread uses them.
        """
        granted = []

        def allocate() -> _Memory | None:
            stride = -(-self._nbytes // _STRIDE) * _STRIDE
            name, room, memory = f"for {self._memory_key}", wanted(), None
            in_place = self._exchange.in_place and placing_slices(channel) is not None
            if allocator is not None and in_place:
                lends, nbytes = room and allocator() is not None, _LENDING_BLOCKS * stride
                memory = channel.run(AllocateIfWanted(nbytes, f"{name}, lent", lends))
            lending = None
            if allocator is not None and memory is not None:
                lending = open_lending(channel, self._plan, memory, allocator, self._memory_key)
            if memory is None:
                memory = channel.run(AllocateIfWanted(stride, name, room))
            granted.append(memory is not None)
            if memory is None:
                return None
            blocks = np.asarray(memory).reshape(-1, stride)[:, : self._nbytes]
            return _Memory(MemoryPool(*blocks), lending)

        memory = context.current().first_use.settle(channel, self._memory_key, allocate)
        self._memory = memory or self._memory
        return any(granted)

    @collective
    def reduce(
        self,
        arrays: Sequence[HostArray],
        name: str,
        channel: Channel,
        own: OwnStep,
        variant: str,
    ) -> tuple[list[HostArray], StepInfo]:
        """Reduce the gradients, or the weights, of one step."""
        memory = self._memory
        block = memory.pool.allocate()
        buffers = cut(self._plan.buckets, {"cpu": block})
        # Other ranks can write into memory of the node only.
        lending = memory.lending if memory.pool.is_given(block) else None
        placed = None if lending is None else lending.buckets(buffers)
        here = context.current()
        reducer = Reducer(
            here,
            channel,
            self._plan,
            buffers,
            self._exchange,
            name,
            communicators=self._communicators,
            placed=placed,
        )
        reducer.weight, reducer.variant = own.weight, variant
        reducer.steps = self._steps if own.number is None else own.number
        reducer.step.flush, reducer.step.local_steps = own.flush, own.local_steps
        if channel.has_thread:  # reduces the first bucket while this one fills the second
            reducer.submit()
        try:
            results = self._fill(arrays, reducer, lending, placed)
        except BaseException:  # Ctrl-C, for example
            reducer.step.abandon()  # else the channel's thread would wait for it
            raise
        reducer.finish()
        self._steps += 1
        assert reducer.step.info is not None
        return [
            results[index].astype(array.dtype, copy=False) for index, array in enumerate(arrays)
        ], reducer.step.info

    def begin(self, arrays: Sequence[HostArray]) -> None:
        """Pass weights that all ranks have in common to the exchange."""
        buffers = cut(self._plan.buckets, {"cpu": self._memory.pool.allocate()})
        pairs = zip(self._plan.buckets, buffers, strict=True)
        for number, (bucket, buffer) in enumerate(pairs):
            elements = buffer.array()
            for index, start in zip(bucket.parameters, bucket.starts, strict=True):
                elements[start : start + arrays[index].size] = arrays[index].reshape(-1)
            self._exchange.begin(FilledBucket(number, buffer, bucket, self._plan.specs))

    def _fill(
        self,
        arrays: Sequence[HostArray],
        reducer: Reducer,
        lending: Lending | None,
        placed: Sequence[LentBucket | None] | None,
    ) -> dict[int, HostArray]:
        """Copy or lend the gradients to the buckets and return a view of each, by index."""
        results = {}
        lent = placed or [None] * len(reducer.buffers)
        rows = zip(self._plan.buckets, reducer.buffers, lent, strict=True)
        for bucket, buffer, lends in rows:
            elements = buffer.array()
            for index, start in zip(bucket.parameters, bucket.starts, strict=True):
                array = arrays[index]
                view = elements[start : start + array.size].reshape(array.shape)
                if lending is not None and lending.lend(lends, index, array):
                    pass
                elif view.dtype == array.dtype and view.nbytes >= _LARGE_BYTES:
                    whole = np.ascontiguousarray(array)
                    reducer.put(Buffer.from_array(whole), Buffer.from_array(view))
                else:
                    np.copyto(view, array, casting="unsafe")
                results[index] = view
                reducer.ready(index)
            reducer.launch()
        return results
