"""Optimizer steps on arrays whose work, and whose state, the ranks of a node share."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from hvdtrain.arrays import HostArray
from hvdtrain.buffer import Buffer, Elements
from hvdtrain.core import context
from hvdtrain.core.arrays.memory import MemoryPool, empty
from hvdtrain.core.arrays.state_memory import StateMemory
from hvdtrain.core.arrays.update_rules import Block, UpdateRule, cast
from hvdtrain.core.bucket_plans import agree_on_bucket_size
from hvdtrain.core.collectives.allreduce import Allreduce
from hvdtrain.core.collectives.memory import AllocateMemory
from hvdtrain.core.gradient_settings import GradientSettings
from hvdtrain.core.gradients.memory import bucket_memory, cut
from hvdtrain.core.gradients.plan import ParameterSpec, make_plan
from hvdtrain.core.gradients.reducer import Reducer
from hvdtrain.core.process_set import ProcessSet
from hvdtrain.core.sharding.exchange import ShardedExchange
from hvdtrain.core.sharding.operations import PutSegments, SlicedBuckets, SpreadSlices
from hvdtrain.core.sharding.segments import Segment
from hvdtrain.engines.slices import Slices
from hvdtrain.types import ReduceOp

__all__ = ["SharedSteps", "StepValues", "node_slices"]

# Elements that stay in the caches while all operations of a step are applied to them.
_BLOCK_ELEMENTS = 16 << 10
# Variables without a gradient that a message names.
_MOST_NAMED = 8


@dataclass(frozen=True)
class StepValues:
    """What an optimizer's settings say about a step, equal on all ranks.

    Attributes:
        rate: learning rate.
        steps: number of steps before.
        decay: by which the weights are multiplied, times the rate, and reduced before the step.
        decayed: whether each variable decays.
        clip_norm: maximum of the norm of all gradients together; None for no limit.
        clip_value: maximum of the absolute value of each element; None for no limit.
    """

    rate: float
    steps: int
    decay: float | None
    decayed: Sequence[bool]
    clip_norm: float | None = None
    clip_value: float | None = None


def node_slices(process_set: ProcessSet) -> Slices | None:
    """Return the slices of memory that the ranks of a node share (local).

    Args:
        process_set: ranks that take part.

    Returns:
        The slices; None, on all ranks of the set, if they cannot share their work.
    """
    if not process_set.included() or process_set.size() == 1:
        return None
    slices = process_set.channel().communicator.slices()
    return slices if slices is not None and slices.owners > 1 else None


class SharedSteps:
    """Steps of an optimizer on the variables of a model; all ranks have copies of these.

    A rank of a node adds its slice of all ranks' gradients, updates these weights and keeps their
    state in memory of the node; then the ranks tell each other their new weights.

    Args:
        specs: the variables, float32 or float64.
        settings: settings of the reduction.
        slices: result of node_slices().
        rule: how each element is updated.
        name: operation name.

    Attributes:
        state: the state of all variables.
    """

    def __init__(
        self,
        specs: Sequence[ParameterSpec],
        settings: GradientSettings,
        slices: Slices,
        rule: UpdateRule,
        name: str,
    ) -> None:
        self._specs, self._settings, self._slices = specs, settings, slices
        self._rule, self._name = rule, name
        self._channel = settings.process_set.channel()
        self.state = StateMemory(specs, rule.quantities, slices.number)
        self._reducer: Reducer | None = None

    def step(
        self,
        weights: Sequence[HostArray],
        gradients: Mapping[int, HostArray],
        values: StepValues,
        samples: float | None,
    ) -> dict[int, HostArray]:
        """Update the variables that have a gradient (collective, blocking).

        Args:
            weights: the values of all variables, the same on all ranks.
            gradients: gradients of this rank by number of the variable; the same numbers on all.
            values: settings of this step.
            samples: weight of this rank in the average; None for 1.

        Returns:
            The new values of these variables by number. Their memory is reused when nothing refers
            to it any more.

        Raises:
            RuntimeError: the ranks of a node cannot share memory for gradients or state.
        """
        reducer = self._reducer or self._open()
        self._reduce(reducer, gradients, samples)
        self.state.apply_factors()  # all ranks are in this step
        own = [segment for segment in self.state.owned if segment.parameter in gradients]
        parts = [reducer.buffers[s.bucket].slice(s.start, s.count).array() for s in own]
        self._clip(parts, values)
        for segment, part in zip(own, parts, strict=True):
            self._update(segment, weights[segment.parameter].reshape(-1), part, values)
        name = f"weights of {self._name}"
        buckets = SlicedBuckets(reducer.buffers, reducer.placed, self._slices)
        self._channel.run(SpreadSlices(buckets, name))
        return self._results(reducer, gradients)

    def _open(self) -> Reducer:
        """Allocate memory for gradients, weights and state (collective)."""
        size = agree_on_bucket_size(self._channel).nbytes
        plan = make_plan(self._specs, size, size)
        memory = bucket_memory(self._channel, plan, self._name, {"cpu": "cpu"})
        self._require_shared(memory["cpu"])
        nbytes = self.state.plan(plan, self._slices.owners)
        kept = self._channel.run(AllocateMemory(nbytes, f"of the optimizer of {self._name}"))
        self.state.use(self._require_shared(kept))
        # All have written what they had.
        self._channel.run(PutSegments([], None, f"state of {self._name}"))
        exchange = ShardedExchange(self._slices, self._settings.op, self._settings.predivide)
        exchange.whole = False
        buffers = cut(plan.buckets, memory)
        self._pool = MemoryPool(empty([Buffer.of(memory["cpu"]).nbytes], np.uint8))
        self._reducer = Reducer(
            context.current(), self._channel, plan, buffers, exchange, self._name
        )
        return self._reducer

    def _require_shared(self, memory: Elements) -> list[HostArray]:
        copies = self._slices.copies(memory)
        if copies is None:
            raise RuntimeError(
                f"sharded=True: {Buffer.of(memory).nbytes >> 10:,} KiB for the optimizer cannot be "
                "shared on this node: free memory, or use sharded=False"
            )
        return copies

    def _reduce(
        self, reducer: Reducer, gradients: Mapping[int, HostArray], samples: float | None
    ) -> None:
        """Bring the sums or averages of gradients to their owners (collective)."""
        missing = [str(i) for i in range(len(self._specs)) if i not in gradients]
        reducer.variant = _without(missing) if missing else ""
        reducer.weight = samples
        try:
            for bucket, buffer in zip(reducer.plan.buckets, reducer.buffers, strict=True):
                for index, start in zip(bucket.parameters, bucket.starts, strict=True):
                    place = buffer.slice(start, self._specs[index].count)
                    if index in gradients:
                        whole = np.ascontiguousarray(gradients[index])
                        reducer.put(Buffer.from_array(whole), place)
                    else:
                        place.zero()
                    reducer.ready(index)
                reducer.launch()
            reducer.finish()
        except BaseException:  # Ctrl-C, for example
            reducer.step.abandon()  # else the channel's thread would wait for it
            raise
        finally:
            reducer.forget()
        reducer.steps += 1

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

    def _update(
        self, segment: Segment, weights: HostArray, part: HostArray, values: StepValues
    ) -> None:
        """Replace the gradient of a segment by its new weights (local)."""
        own = weights[segment.first : segment.first + segment.count]
        state = self.state.of(segment)
        decay = values.decay if values.decayed[segment.parameter] else None
        for start in range(0, segment.count, _BLOCK_ELEMENTS):
            block = slice(start, start + _BLOCK_ELEMENTS)
            updated = own[block].copy()
            if decay is not None:
                updated -= updated * cast(decay, own.dtype) * own.dtype.type(values.rate)
            kept = [quantity[block] for quantity in state]
            self._rule.update(Block(updated, part[block], kept, values.rate, values.steps))
            part[block] = updated

    def _results(
        self, reducer: Reducer, gradients: Mapping[int, HostArray]
    ) -> dict[int, HostArray]:
        """Copy the new weights, because the framework keeps them and the memory is shared."""
        results = {}
        copies = cut(reducer.plan.buckets, {"cpu": self._pool.allocate()})
        for bucket, buffer, copy in zip(reducer.plan.buckets, reducer.buffers, copies, strict=True):
            reducer.put(buffer, copy)
            for index, start in zip(bucket.parameters, bucket.starts, strict=True):
                spec = self._specs[index]
                if index in gradients:
                    results[index] = copy.slice(start, spec.count).array().reshape(spec.shape)
        return results


def _without(missing: Sequence[str]) -> str:
    """Return what differs between ranks on which other variables have no gradient."""
    named = ", ".join(missing[:_MOST_NAMED])
    if len(missing) > _MOST_NAMED:
        digest = hashlib.blake2b(",".join(missing).encode(), digest_size=4).hexdigest()
        named += f" and {len(missing) - _MOST_NAMED} others ({digest})"
    return f" without gradients of variables {named}, which have to be missing on all ranks or none"
