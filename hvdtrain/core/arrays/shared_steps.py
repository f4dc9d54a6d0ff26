"""Optimizer steps on arrays whose work, and whose state, the ranks of a node share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from hvdtrain.arrays import HostArray
from hvdtrain.buffer import Buffer, Elements
from hvdtrain.collective import collective
from hvdtrain.core import context
from hvdtrain.core.arrays.collectives import Lending, MemoryPool, aligned_order, open_lending
from hvdtrain.core.arrays.fused import fill
from hvdtrain.core.bucket_plans import agree_on_bucket_size
from hvdtrain.core.gradient_settings import GradientSettings
from hvdtrain.core.gradients.plan import (
    Bucket,
    BucketPlan,
    ParameterSpec,
    bucket_memory,
    cut,
    make_plan,
)
from hvdtrain.core.gradients.reducer import Reducer
from hvdtrain.core.gradients.step_info import OwnStep
from hvdtrain.core.places import LentBucket
from hvdtrain.core.process_set import ProcessSet
from hvdtrain.core.sharding.exchange import ShardedExchange
from hvdtrain.core.sharding.owners import NodeOwners, StateMemory, require_shared
from hvdtrain.core.sharding.segments import (
    Quantity,
    Segment,
    newton_schulz_cost,
    segments_of,
)
from hvdtrain.engines.communicator import Slices


def cast(number: float, dtype: np.dtype[Any]) -> Any:
    """Return a setting in the type of the weights, by way of float32, as Keras casts numbers."""
    return dtype.type(np.float32(number))


@dataclass(frozen=True)
class StepValues:
    """What an optimizer's settings say about a step, equal on all ranks."""

    rate: float
    steps: int
    decays: Sequence[float | None]
    clip_norm: float | None = None
    clip_value: float | None = None


# What an optimizer keeps for a variable, an array for each quantity.
State: TypeAlias = Sequence[HostArray]


class UpdateRule(Protocol):
    """How an optimizer updates the elements of a variable, each by itself if it is not `whole`."""

    whole: bool

    @property
    def quantities(self) -> Sequence[str]: ...

    def update(
        self, weights: HostArray, gradient: HostArray, state: State, now: StepValues
    ) -> None:
        """Update weights and state, [n] for each quantity, in place; overwrite the gradient."""


@dataclass(frozen=True)
class SgdRule:
    """v = momentum v - rate g; w = w + v, or w + momentum v - rate g with Nesterov's momentum."""

    momentum: float
    nesterov: bool
    whole = False

    @property
    def quantities(self) -> Sequence[str]:
        return ("momentum",) if self.momentum else ()

    def update(
        self, weights: HostArray, gradient: HostArray, state: State, now: StepValues
    ) -> None:
        momentum = cast(self.momentum, weights.dtype)
        gradient *= weights.dtype.type(now.rate)
        if not state:
            weights -= gradient
            return
        (velocity,) = state
        velocity *= momentum
        velocity -= gradient
        if self.nesterov:
            weights += velocity * momentum - gradient
        else:
            weights += velocity


@dataclass(frozen=True)
class AdamRule:
    """Adam (arXiv 1412.6980), in the form before section 2.1 of the paper, as Keras computes it."""

    beta_1: float
    beta_2: float
    epsilon: float
    amsgrad: bool
    ratio: float = 1.0  # of its rate to that of the optimizer
    whole = False

    @property
    def quantities(self) -> Sequence[str]:
        return ("momentum", "velocity", *(("velocity_hat",) if self.amsgrad else ()))

    def update(
        self, weights: HostArray, gradient: HostArray, state: State, now: StepValues
    ) -> None:
        kind = weights.dtype.type
        power_1, power_2 = (
            np.power(cast(beta, weights.dtype), kind(now.steps + 1))
            for beta in (self.beta_1, self.beta_2)
        )
        alpha = kind(now.rate * self.ratio) * np.sqrt(kind(1) - power_2) / (kind(1) - power_1)
        first, second = state[:2]
        change = gradient - first
        change *= kind(1 - self.beta_1)
        first += change
        np.multiply(gradient, gradient, out=change)
        change -= second
        change *= kind(1 - self.beta_2)
        second += change
        if self.amsgrad:
            second = np.maximum(state[2], second, out=state[2])
        np.sqrt(second, out=change)
        change += kind(self.epsilon)
        np.multiply(first, alpha, out=gradient)
        gradient /= change
        weights -= gradient


@dataclass(frozen=True)
class MuonRule:
    """m = momentum m + g; w -= rate O(m), or rate O(g + momentum m) with Nesterov's momentum.

    O(m) is the orthogonalized and scaled matrix that `orthogonalize` returns.
    """

    momentum: float
    nesterov: bool
    shape: tuple[int, ...]
    orthogonalize: Callable[[HostArray], HostArray]
    whole = True

    @property
    def quantities(self) -> Sequence[str]:
        return ("momentum",)

    def update(
        self, weights: HostArray, gradient: HostArray, state: State, now: StepValues
    ) -> None:
        (velocity,) = state
        velocity += gradient + velocity * cast(self.momentum - 1, weights.dtype)
        wanted = velocity
        if self.nesterov:
            wanted = gradient + velocity * cast(self.momentum, weights.dtype)
        change = self.orthogonalize(wanted.reshape(self.shape)).reshape(-1)
        weights -= change * weights.dtype.type(now.rate)


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


class KeptArray:
    """One number for each element of a variable; 0 at first.

    Any rank reads and writes the whole array between two steps, as checkpoints do. All ranks that
    write it have the same values.
    """

    def __init__(self, shape: Sequence[int], dtype: npt.DTypeLike) -> None:
        self.shape, self.dtype = tuple(shape), dtype
        self._value: HostArray | None = None  # until there is memory of the node
        self._parts: Sequence[tuple[Segment, HostArray]] = ()
        self._own: HostArray | None = None
        self._factor: float | None = None

    def move(self, parts: Sequence[tuple[Segment, HostArray]], own: HostArray | None) -> None:
        """Keep the array in memory of its owners, which is zero; `own` is the part of this rank."""
        self._parts, self._own = parts, own
        if self._value is not None:
            self._write(self._value)
        self._value = None

    def read(self) -> HostArray:
        whole = np.zeros(self.shape, self.dtype) if self._value is None else self._value.copy()
        elements = whole.reshape(-1)
        for segment, part in self._parts:
            elements[segment.in_parameter] = part
        if self._factor is not None:
            elements *= elements.dtype.type(self._factor)
        return whole

    def write(self, value: HostArray) -> None:
        self._factor = None
        if self._parts:
            self._write(value)
        else:
            self._value = np.array(value, self.dtype)

    def _write(self, value: HostArray) -> None:
        elements = value.reshape(-1)
        for segment, part in self._parts:
            part[...] = elements[segment.in_parameter]

    def scale(self, factor: float) -> None:
        """Multiply the array (between two steps; by the same factor on all ranks).

        Another rank may still be reading the whole array, so that the memory changes in the next
        step only; see apply_factor(). Until then read() multiplies.
        """
        self._factor = (1.0 if self._factor is None else self._factor) * factor

    def apply_factor(self) -> None:
        """Multiply the part of this rank, in a step, when no rank reads the array."""
        if self._factor is not None and self._own is not None:
            self._own *= self._own.dtype.type(self._factor)
        self._factor = None


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
        rules: Sequence[UpdateRule],
        kept: Mapping[tuple[int, str], KeptArray],
        name: str,
    ) -> None:
        self._specs, self._settings, self._rules, self._kept = specs, settings, rules, kept
        self._whole = any(rule.whole for rule in rules)
        self._owners = NodeOwners(settings.process_set.channel(), slices, name)
        self._reducer: Reducer | None = None
        self._steps = 0

    @collective
    def step(
        self,
        weights: Sequence[HostArray],
        gradients: Mapping[int, HostArray],
        values: StepValues,
        samples: float | None,
    ) -> dict[int, HostArray]:
        reducer = self._reducer or self._open()
        step, self._steps = self._steps, self._steps + 1
        block, free = self._new.take(step)
        direct = self._reduce(reducer, gradients, samples, free)
        places = self._new.places(step) if direct else self._gradients
        for kept in self._kept.values():
            kept.apply_factor()  # all ranks are in this step
        numbers = [n for n, s in enumerate(self._owned) if s.parameter in gradients]
        parts = {n: self._gradients[n][self._owners.number] for n in numbers}
        self._clip(list(parts.values()), values)
        for number, part in parts.items():
            segment = self._owned[number]
            own = weights[segment.parameter].reshape(-1)[segment.in_parameter]
            self._update(segment, own, part, self._state[number], places[number], values)
        self._owners.put("weights")  # which are written
        return self._results(reducer, gradients, block, copied=not direct)

    def _update(
        self,
        segment: Segment,
        own: HostArray,
        gradient: HostArray,
        state: State,
        places: Sequence[HostArray],
        values: StepValues,
    ) -> None:
        """Write new weights to all places, update the state, and overwrite the gradient."""
        decay, rule = values.decays[segment.parameter], self._rules[segment.parameter]
        length = max(1, segment.count) if rule.whole else _BLOCK_ELEMENTS
        for start in range(0, segment.count, length):
            block = slice(start, start + length)
            updated = own[block].copy()
            if decay is not None:
                updated -= updated * cast(decay, own.dtype) * own.dtype.type(values.rate)
            kept = [quantity[block] for quantity in state]
            rule.update(updated, gradient[block], kept, values)
            for place in places:
                place[block] = updated

    @collective
    def _open(self) -> Reducer:
        """Allocate memory for gradients, weights and state."""
        owners, channel = self._owners, self._owners.channel
        size = agree_on_bucket_size(channel).nbytes
        order = aligned_order([spec.nbytes for spec in self._specs])
        plan = make_plan(self._specs, size, size, order=order)
        memory = bucket_memory(channel, plan, owners.name, {"cpu": "cpu"})["cpu"]
        nbytes = Buffer.of(memory).nbytes
        self._state = self._open_state(plan)
        copies = require_shared(owners.slices.copies(memory), nbytes, "gradients")
        self._gradients = places_of(plan.buckets, copies, self._owned)
        weights = owners.allocate(NewWeights.memory_bytes(nbytes), "new weights")
        self._new = NewWeights(plan.buckets, weights, owners.number, self._owned, nbytes)
        self._open_lending(plan, memory)
        owners.put("state")  # which is written
        total = self._settings.op, self._settings.predivide
        exchange = ShardedExchange(owners.slices, *total, self._whole)
        exchange.whole = self._whole
        self._reducer = Reducer(
            *(context.current(), channel, exchange, owners.name, plan, self._buffers),
            placed=self._lent,
            numbers=1,
        )
        return self._reducer

    @collective
    def _open_lending(self, plan: BucketPlan, memory: Elements) -> None:
        self._buffers, find = cut(plan.buckets, {"cpu": memory}), self._settings.allocator
        self._lending: Lending | None = None
        if find is not None:
            owners = self._owners
            self._lending = open_lending(owners.channel, plan, memory, find, owners.name)
        self._lent: list[LentBucket | None] = [None] * len(plan.buckets)
        if self._lending is not None:
            self._lent = self._lending.buckets(self._buffers)

    @collective
    def _open_state(self, plan: BucketPlan) -> list[list[HostArray]]:
        """Move the state to memory of its owners; return that of each segment of this rank."""
        owners = self._owners
        quantities = [
            {name: Quantity(name, spec.dtype, elementwise=True) for name in rule.quantities}
            for spec, rule in zip(self._specs, self._rules, strict=True)
        ]
        costs = [
            newton_schulz_cost(spec.shape) if rule.whole else spec.count
            for spec, rule in zip(self._specs, self._rules, strict=True)
        ]
        segments = segments_of(plan, owners.slices.owners, costs if self._whole else None)
        memory = StateMemory(owners, segments, quantities)
        self._owned = memory.owned

        def array(index: int, part: HostArray) -> HostArray:
            return part.view(self._specs[index].dtype.numpy)

        own = {
            (segment.parameter, name): array(segment.parameter, memory.own(segment.parameter, name))
            for segment in self._owned
            for name in quantities[segment.parameter]
        }
        for (index, name), kept in self._kept.items():
            parts = [(segment, array(index, part)) for segment, part in memory.parts(index, name)]
            kept.move(parts, own.get((index, name)))
        return [[own[s.parameter, name] for name in quantities[s.parameter]] for s in self._owned]

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
        own = OwnStep(samples, variant=_without(missing) if missing else "")
        reducer.numbers[0] = not free
        try:
            fill(reducer, own, gradients, self._lending, self._lent)
            (occupied,) = reducer.finish(own)
        except BaseException:  # Ctrl-C, for example
            reducer.step.abandon()  # else the channel's thread would wait for it
            raise
        finally:
            reducer.forget()
        return not occupied

    @collective
    def _clip(self, parts: Sequence[HostArray], values: StepValues) -> None:
        """Clip the gradients that this rank owns (collective if by their norm)."""
        if values.clip_value is not None:
            for part in parts:
                np.clip(part, -values.clip_value, values.clip_value, out=part)
        if values.clip_norm is None:
            return
        norm = sqrt(self._owners.total(sum(float(np.vdot(part, part)) for part in parts)))
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
                reducer.channel.communicator.put(buffer, part)
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
