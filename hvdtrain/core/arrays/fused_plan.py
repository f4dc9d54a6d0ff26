"""Bucket plans for arrays of gradients, in memory that the engine reduces fastest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.core import context
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.arrays.memory import ALIGNMENT_BYTES, Array, LentMemory, empty
from hvdtrain.core.collectives.memory import AllocateIfWanted
from hvdtrain.core.gradients.allreduce import AllreduceExchange
from hvdtrain.core.gradients.communicators import Communicators, open_communicators
from hvdtrain.core.gradients.exchange import Exchange
from hvdtrain.core.gradients.memory import cut, memory_bytes
from hvdtrain.core.gradients.plan import ParameterSpec, make_plan
from hvdtrain.core.gradients.reducer import Reducer
from hvdtrain.core.process_set import ProcessSet
from hvdtrain.types import ReduceOp

__all__ = ["FusedPlan", "FusedSettings"]

# Gradients from this size on do not stay in the caches until they are reduced.
_LARGE_BYTES = 256 << 10


@dataclass(frozen=True)
class FusedSettings:
    """Settings of a fused reduction.

    Attributes:
        op: reduction, AVERAGE or SUM.
        process_set: ranks that take part.
        predivide: divisor of gradients before the sum, by which the sum is multiplied again.
        groups: indices of gradients that are reduced together.
        exchange: exchange to use instead of the average or sum.
    """

    op: ReduceOp
    process_set: ProcessSet
    predivide: float = 1.0
    groups: tuple[tuple[int, ...], ...] = ()
    exchange: Exchange | None = None


class FusedPlan:
    """Reduces gradients of given shapes and types.

    Ranks agree on shapes and types in each step, so they create a plan in the same step.

    Args:
        specs: gradients, in the order of the model.
        settings: settings of the reduction.
        bucket_bytes: maximum size of a bucket.
    """

    def __init__(
        self, specs: Sequence[ParameterSpec], settings: FusedSettings, bucket_bytes: int
    ) -> None:
        # Plans have the reverse order of the model. Gradients of unaligned sizes come last, so
        # that all others are aligned and become tensors of TensorFlow without a copy.
        aligned = [spec.nbytes % ALIGNMENT_BYTES == 0 for spec in specs]
        order = sorted(range(len(specs)), key=aligned.__getitem__)[::-1]
        self._plan = make_plan(specs, bucket_bytes, bucket_bytes, settings.groups, order)
        self._exchange = settings.exchange or AllreduceExchange(settings.op, settings.predivide)
        self._exchange.prepare(self._plan)
        self._steps = 0
        self._nbytes = memory_bytes(self._plan).get("cpu", 0)
        self._memory_key = f"plan {self._plan.digest}, {self._exchange.spec}"
        channel = settings.process_set.channel()
        self._communicators = _communicators(channel, self._exchange)
        known: LentMemory | None = context.current().first_use.find(channel, self._memory_key)
        self._memory = known or LentMemory(empty([self._nbytes], np.uint8))

    def use_engine_memory(self, channel: Channel, wanted: Callable[[], bool]) -> bool:
        """Allocate the memory of further steps in the engine (collective on first use).

        This is done once for all plans of the same gradients, in any thread.

        Args:
            channel: channel of the ranks.
            wanted: function that returns whether this rank wants it; called on first use.

        Returns:
            Whether this call has allocated it.

        Raises:
            MismatchError: a rank has joined.
        """
        granted = []

        def ask() -> LentMemory | None:
            memory = channel.run(
                AllocateIfWanted(self._nbytes, f"for {self._memory_key}", wanted())
            )
            granted.append(memory is not None)
            return None if memory is None else LentMemory(np.asarray(memory))

        memory = context.current().first_use.settle(channel, self._memory_key, ask)
        self._memory = memory or self._memory
        return any(granted)

    def reduce(
        self, arrays: Sequence[Array], name: str, channel: Channel, weight: float | None
    ) -> list[Array]:
        """Return the reduced gradients (collective, blocking).

        Args:
            arrays: gradients of this rank, with the shapes and types of the plan.
            name: name of the operation, equal on all ranks.
            channel: channel of the ranks.
            weight: weight of this rank in the average; None for 1.
        """
        buffers = cut(self._plan.buckets, {"cpu": self._memory.lend()})
        here = context.current()
        reducer = Reducer(
            here,
            channel,
            self._plan,
            buffers,
            self._exchange,
            name,
            communicators=self._communicators,
        )
        reducer.weight, reducer.steps = weight, self._steps
        if channel.has_thread:  # it reduces the first bucket while the second one is filled
            reducer.submit()
        try:
            results = self._fill(arrays, reducer)
        except BaseException:  # Ctrl-C, for example
            reducer.step.abandon()  # the channel's thread would wait for it
            raise
        reducer.finish()
        self._steps += 1
        return [
            results[index].astype(array.dtype, copy=False) for index, array in enumerate(arrays)
        ]

    def _fill(self, arrays: Sequence[Array], reducer: Reducer) -> dict[int, Array]:
        """Copy the gradients into the buckets; return views of them there, by index."""
        results = {}
        for bucket, buffer in zip(self._plan.buckets, reducer.buffers, strict=True):
            elements = buffer.array()
            for index, start in zip(bucket.parameters, bucket.starts, strict=True):
                array = arrays[index]
                view = elements[start : start + array.size].reshape(array.shape)
                if view.dtype == array.dtype and view.nbytes >= _LARGE_BYTES:
                    whole = np.ascontiguousarray(array)
                    reducer.put(Buffer.from_array(whole), Buffer.from_array(view))
                else:
                    np.copyto(view, array, casting="unsafe")
                results[index] = view
                reducer.ready(index)
            reducer.launch()
        return results


def _communicators(channel: Channel, exchange: Exchange) -> Communicators | None:
    """Return the communicators of an exchange, shared by all plans (collective on first use)."""
    here = context.current()
    if not exchange.hierarchical:
        return None
    name = "communicators"
    communicators: Communicators = here.first_use.settle(
        channel,
        name,
        lambda: open_communicators(channel, exchange.spec, here.topology.node, name),
    )
    return communicators
