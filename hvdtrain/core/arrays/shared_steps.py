"""Optimizer steps on arrays whose work, and whose state, the ranks of a node share."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from hvdtrain.arrays import HostArray
from hvdtrain.buffer import Buffer, Elements
from hvdtrain.collective import collective
from hvdtrain.core import context
from hvdtrain.core.arguments import GradientSettings
from hvdtrain.core.arrays.memory import Lending, MemoryPool, aligned_order, open_lending
from hvdtrain.core.arrays.state_memory import KeptArray
from hvdtrain.core.arrays.update_rules import UpdateRule, cast
from hvdtrain.core.bucket_plans import agree_on_bucket_size
from hvdtrain.core.collectives.allreduce import Allreduce
from hvdtrain.core.gradients.plan import (
    Bucket,
    BucketPlan,
    ParameterSpec,
    bucket_memory,
    cut,
    make_plan,
)
from hvdtrain.core.gradients.reducer import Reducer
from hvdtrain.core.places import LentBucket
from hvdtrain.core.process_set import ProcessSet
from hvdtrain.core.sharding.exchange import PutSegments, ShardedExchange
from hvdtrain.core.sharding.segments import Quantity, Segment, segments_of
from hvdtrain.core.sharding.state_memory import StateMemory, allocate_shared, require_shared
from hvdtrain.engines.features import Slices
from hvdtrain.types import ReduceOp

# Variables keep the weights of a step while those of the next one are written.
_BLOCKS = 2
_ALIGNMENT_BYTES = 4096


def node_slices(process_set: ProcessSet) -> Slices | None:
    if not process_set.included() or process_set.size() == 1:
        return None
    slices = process_set.channel().communicator.slices()
    return slices if slices is not None and slices.owners > 1 else None


def places_of(
    buckets: Sequence[Bucket], memories: Sequence[HostArray], segments: Sequence[Segment]
) -> list[list[HostArray]]:
    """Return the place of each segment in the memory of each rank, [count] each."""
    ranks = [cut(buckets, {"cpu": memory}) for memory in memories]
    return [
        [buffers[each.bucket].slice(each.start, each.count).array() for buffers in ranks]
        for each in segments
    ]


class NewWeights:
    """Memory of the node for the new weights of this rank (all local).

    Odd and even steps have a block each. A variable without a gradient, or a program that keeps
    tensors, may keep a block for longer.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        memories: Sequence[HostArray],
        number: int,
        owned: Sequence[Segment],
        nbytes: int,
    ) -> None:
        turns = [
            [memory.reshape(_BLOCKS, -1)[turn, :nbytes] for memory in memories]
            for turn in range(_BLOCKS)
        ]
        self._pools = [MemoryPool(parts[number]) for parts in turns]
        self._places = [places_of(buckets, parts, owned) for parts in turns]

    @staticmethod
    def memory_bytes(nbytes: int) -> int:
        """Return the memory that each rank needs for buckets of this size in all."""
        return _BLOCKS * (-(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)

    def take(self, step: int) -> tuple[HostArray, bool]:
        """Return memory for this rank's weights, and whether other ranks may write there.

        It is private memory if a tensor still refers to the block of this step.
        """
        pool = self._pools[step % _BLOCKS]
        block = pool.allocate()
        return block, pool.is_given(block)

    def places(self, step: int) -> list[list[HostArray]]:
        return self._places[step % _BLOCKS]


# Elements that stay in the caches while all operations of a step are applied to them.
_BLOCK_ELEMENTS = 16 << 10


@dataclass(frozen=True)
class StepValues:
    """What an optimizer's settings say about a step, equal on all ranks."""

    rate: float
    steps: int
    decay: float | None
    decayed: Sequence[bool]
    clip_norm: float | None = None
    clip_value: float | None = None


# Variables without a gradient that a message names.
_MOST_NAMED = 8


class ArraySharedSteps:
    """Steps of an optimizer on the variables of a model; all ranks have copies of these.

    A rank of a node adds its slice of all ranks' gradients, updates these weights and keeps their
    state in memory of the node; then the ranks tell each other their new weights.
    """

    def __init__(
        self,
        specs: Sequence[ParameterSpec],
        settings: GradientSettings,
        slices: Slices,
        rule: UpdateRule,
        kept: Mapping[tuple[int, str], KeptArray],
        name: str,
    ) -> None:
        self._specs, self._settings, self._slices = specs, settings, slices
        self._rule, self._kept, self._name = rule, kept, name
        self._channel = settings.process_set.channel()
        self._reducer: Reducer | None = None

    @collective
    def step(
        self,
        weights: Sequence[HostArray],
        gradients: Mapping[int, HostArray],
        values: StepValues,
        samples: float | None,
    ) -> dict[int, HostArray]:
        reducer = self._reducer or self._open()
        step = reducer.steps
        block, free = self._new.take(step)
        direct = self._reduce(reducer, gradients, samples, free)
        places = self._new.places(step) if direct else self._gradients
        for kept in self._kept.values():
            kept.apply_factor()  # all ranks are in this step
        numbers = [n for n, s in enumerate(self._owned) if s.parameter in gradients]
        parts = {n: self._gradients[n][self._slices.number] for n in numbers}
        self._clip(list(parts.values()), values)
        for number, part in parts.items():
            segment = self._owned[number]
            own = weights[segment.parameter].reshape(-1)[segment.in_parameter]
            self._update(segment, own, part, self._state[number], places[number], values)
        # All have written their slices of the new weights.
        self._channel.run(PutSegments([], None, f"weights of {self._name}"))
        return self._results(reducer, gradients, block, copied=not direct)

    def _update(
        self,
        segment: Segment,
        own: HostArray,
        gradient: HostArray,
        state: Sequence[HostArray],
        places: Sequence[HostArray],
        values: StepValues,
    ) -> None:
        """Write new weights to all places, update the state, and overwrite the gradient."""
        decay = values.decay if values.decayed[segment.parameter] else None
        for start in range(0, segment.count, _BLOCK_ELEMENTS):
            block = slice(start, start + _BLOCK_ELEMENTS)
            updated = own[block].copy()
            if decay is not None:
                updated -= updated * cast(decay, own.dtype) * own.dtype.type(values.rate)
            kept = [quantity[block] for quantity in state]
            self._rule.update(updated, gradient[block], kept, values.rate, values.steps)
            for place in places:
                place[block] = updated

    @collective
    def _open(self) -> Reducer:
        """Allocate memory for gradients, weights and state."""
        size = agree_on_bucket_size(self._channel).nbytes
        order = aligned_order([spec.nbytes for spec in self._specs])
        plan = make_plan(self._specs, size, size, order=order)
        memory = bucket_memory(self._channel, plan, self._name, {"cpu": "cpu"})["cpu"]
        nbytes = Buffer.of(memory).nbytes
        self._state = self._open_state(plan)
        owned, number = self._owned, self._slices.number
        copies = require_shared(self._slices, memory, "gradients")
        self._gradients = places_of(plan.buckets, copies, owned)
        weights = self._share(NewWeights.memory_bytes(nbytes), "new weights")
        self._new = NewWeights(plan.buckets, weights, number, owned, nbytes)
        self._open_lending(plan, memory)
        # All have written what they had.
        self._channel.run(PutSegments([], None, f"state of {self._name}"))
        exchange = ShardedExchange(self._slices, self._settings.op, self._settings.predivide)
        exchange.whole = False
        self._reducer = Reducer(
            context.current(),
            self._channel,
            plan,
            self._buffers,
            exchange,
            self._name,
            numbers=1,
            placed=self._lent,
        )
        return self._reducer

    @collective
    def _open_lending(self, plan: BucketPlan, memory: Elements) -> None:
        self._buffers, find = cut(plan.buckets, {"cpu": memory}), self._settings.allocator
        self._lending: Lending | None = None
        if find is not None:
            self._lending = open_lending(self._channel, plan, memory, find, self._name)
        self._lent: list[LentBucket | None] = [None] * len(plan.buckets)
        if self._lending is not None:
            self._lent = self._lending.buckets(self._buffers)

    @collective
    def _open_state(self, plan: BucketPlan) -> list[list[HostArray]]:
        """Move the state to memory of its owners; return that of each segment of this rank."""
        names, number = self._rule.quantities, self._slices.number
        quantities = [
            {name: Quantity(name, spec.dtype, elementwise=True) for name in names}
            for spec in self._specs
        ]
        memory = StateMemory(segments_of(plan, self._slices.owners), quantities, number)
        memory.use(self._share(memory.nbytes, "optimizer's state"))
        self._owned = memory.owned

        def array(index: int, part: HostArray) -> HostArray:
            return part.view(self._specs[index].dtype.numpy)

        own = {
            (segment.parameter, name): array(segment.parameter, memory.own(segment.parameter, name))
            for segment in self._owned
            for name in names
        }
        for (index, name), kept in self._kept.items():
            parts = [(segment, array(index, part)) for segment, part in memory.parts(index, name)]
            kept.move(parts, own.get((index, name)))
        return [[own[segment.parameter, name] for name in names] for segment in self._owned]

    @collective
    def _share(self, nbytes: int, purpose: str) -> list[HostArray]:
        return allocate_shared(self._channel, self._slices, nbytes, purpose, self._name)

    @collective
    def _reduce(
        self,
        reducer: Reducer,
        gradients: Mapping[int, HostArray],
        samples: float | None,
        free: bool,
    ) -> bool:
        """Bring sums or averages to their owners; return whether all are free."""
        missing = [str(i) for i in range(len(self._specs)) if i not in gradients]
        reducer.variant = _without(missing) if missing else ""
        reducer.weight = samples
        reducer.numbers[0] = not free
        try:
            self._fill(reducer, gradients)
            (occupied,) = reducer.finish()
        except BaseException:  # Ctrl-C, for example
            reducer.step.abandon()  # else the channel's thread would wait for it
            raise
        finally:
            reducer.forget()
        reducer.steps += 1
        return not occupied

    def _fill(self, reducer: Reducer, gradients: Mapping[int, HostArray]) -> None:
        rows = zip(reducer.plan.buckets, reducer.buffers, self._lent, strict=True)
        for bucket, buffer, lent in rows:
            if lent is not None:
                lent.clear()
            for index, start in zip(bucket.parameters, bucket.starts, strict=True):
                place = buffer.slice(start, self._specs[index].count)
                if index not in gradients:
                    place.zero()
                elif self._lending is None or not self._lending.lend(lent, index, gradients[index]):
                    whole = np.ascontiguousarray(gradients[index])
                    reducer.put(Buffer.from_array(whole), place)
                reducer.ready(index)
            reducer.launch()

    @collective
    def _clip(self, parts: Sequence[HostArray], values: StepValues) -> None:
        """Clip the gradients that this rank owns (collective if by their norm)."""
        if values.clip_value is not None:
            for part in parts:
                np.clip(part, -values.clip_value, values.clip_value, out=part)
        if values.clip_norm is None:
            return
        total = np.array([sum(float(np.vdot(part, part)) for part in parts)], np.float64)
        name = f"norm of {self._name}"
        buffer = Buffer.from_array(total)
        self._channel.run(Allreduce([buffer], [total.shape], ReduceOp.SUM, name))
        norm = sqrt(total[0] / self._slices.nodes)  # every node has all slices
        # A norm that is not finite makes all gradients NaN, as in Keras.
        factor = min(1.0, values.clip_norm / norm) + (norm - norm) if norm else 1.0
        for part in parts:
            part *= part.dtype.type(factor)

    def _results(
        self,
        reducer: Reducer,
        gradients: Mapping[int, HostArray],
        block: HostArray,
        copied: bool,
    ) -> dict[int, HostArray]:
        """Return the new weights, copied if owners could not write them where they stay."""
        results = {}
        parts = cut(reducer.plan.buckets, {"cpu": block})
        for bucket, buffer, part in zip(reducer.plan.buckets, reducer.buffers, parts, strict=True):
            if copied:
                reducer.put(buffer, part)
            for index, start in zip(bucket.parameters, bucket.starts, strict=True):
                spec = self._specs[index]
                if index in gradients:
                    results[index] = part.slice(start, spec.count).array().reshape(spec.shape)
        return results


def _without(missing: Sequence[str]) -> str:
    """Return what differs between ranks on which other variables have no gradient."""
    named = ", ".join(missing[:_MOST_NAMED])
    if len(missing) > _MOST_NAMED:
        digest = hashlib.blake2b(",".join(missing).encode(), digest_size=4).hexdigest()
        named += f" and {len(missing) - _MOST_NAMED} others ({digest})"
    return f" without gradients of variables {named}, which have to be missing on all ranks or none"
