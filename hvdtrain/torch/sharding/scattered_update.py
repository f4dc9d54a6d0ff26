"""The optimizer's step, shared by ranks that share no memory, also on devices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core.agreement.operation import Operation
from hvdtrain.core.agreement.request import Request
from hvdtrain.core.agreement.votes import exchange
from hvdtrain.core.collectives.allreduce import Allreduce
from hvdtrain.core.gradients.plan import STEP, Bucket, BucketPlan
from hvdtrain.core.sharding.exchange import GatherSlices, ScatteredSlices
from hvdtrain.core.sharding.segments import Segment, segments_of
from hvdtrain.engines.communicator import Communicator
from hvdtrain.errors import UnsupportedError
from hvdtrain.torch.gradients.buckets import ParameterBuckets
from hvdtrain.torch.sharding.segment_optimizer import SegmentSteps, is_elementwise
from hvdtrain.torch.sharding.state_memory import UserState, in_memory_order
from hvdtrain.torch.tensors.routes import as_buffer, from_buffer
from hvdtrain.types import ReduceOp

_Entry = dict[str, Any]


@dataclass(frozen=True)
class _Elements:
    """A tensor with a number for each element of the parameter."""

    dtype: torch.dtype


@dataclass(frozen=True)
class _OnDevice:
    """Another tensor on a device, the same for all segments of the parameter."""

    dtype: torch.dtype
    shape: torch.Size


# Values of a state: what has its elements on several ranks or on a device is gathered there, and
# anything else comes with the outline.
_Outline = dict[int, _Entry]


class GatherStates(Operation):
    """Bring the state of all parameters together, on every rank or on one.

    It takes the place of a step of the plan, so that a rank which submits a step gets an error, as
    the others do. The result is the state of each parameter that has one, by index.
    """

    def __init__(
        self,
        name: str,
        slices: ScatteredSlices,
        plan: BucketPlan,
        owned: Mapping[int, Segment],
        state: Mapping[int, _Entry],
        devices: Sequence[torch.device],
        to: int | None,
    ) -> None:
        super().__init__()
        self._slices, self._plan, self._devices = slices, plan, devices
        self._owned, self._state = owned, state
        self._keeps = to is None or to == slices.number
        whom = "all members" if to is None else f"member {to}"
        self.request = Request(STEP, name, (("optimizer state for", whom),))

    @collective
    def execute(self, communicator: Communicator) -> dict[int, _Entry]:
        outlines = [outline for (outline,) in exchange(communicator, [self._outline()])]
        self._holders: dict[int, int] = {}  # a rank with a segment of each parameter
        found: dict[int, _Entry] = {}
        for rank, outline in enumerate(outlines):
            found |= {index: dict(entry) for index, entry in sorted(outline.items())}
            self._holders |= dict.fromkeys(outline, rank)
        for number, bucket in enumerate(self._plan.buckets):
            for name, kind in self._kinds(bucket, found):
                wanted = [i for i in bucket.parameters if found.get(i, {}).get(name) == kind]
                if isinstance(kind, _Elements):
                    values = self._gather_elements(number, name, kind, wanted)
                else:
                    values = self._gather_values(number, name, kind, wanted)
                for index, value in zip(wanted, values, strict=True):
                    found[index][name] = value
        return found if self._keeps else {}

    def _outline(self) -> _Outline:
        """Return what this rank keeps for its segments, without what is gathered."""
        return {
            index: {name: self._kind(index, name, value) for name, value in entry.items()}
            for index, entry in self._state.items()
        }

    def _kind(self, index: int, name: str, value: Any) -> Any:
        if is_elementwise(name, value, (self._owned[index].count,)):
            return _Elements(value.dtype)
        if isinstance(value, torch.Tensor) and not value.is_cpu:
            return _OnDevice(value.dtype, value.shape)
        return value

    def _kinds(
        self, bucket: Bucket, found: Mapping[int, _Entry]
    ) -> list[tuple[str, _Elements | _OnDevice]]:
        """Return name and kind of what is gathered for a bucket, in the same order on all ranks."""
        items = [item for index in bucket.parameters for item in found.get(index, {}).items()]
        gathered = [item for item in items if isinstance(item[1], (_Elements, _OnDevice))]
        return list(dict.fromkeys(gathered))

    def _gather_elements(
        self, number: int, name: str, kind: _Elements, wanted: Sequence[int]
    ) -> list[torch.Tensor]:
        """Gather the elements that parameters of a bucket have under a name."""
        bucket = self._plan.buckets[number]
        length, (low, _) = self._slices.length(bucket.count), self._slices.own(bucket.count)
        part = torch.zeros(length, dtype=kind.dtype, device=self._devices[number])
        for index in self._own(wanted):
            segment = self._owned[index]
            first = segment.start - low
            part[first : first + segment.count] = self._state[index][name]
        whole = from_buffer(self._slices.gather(as_buffer(part)))
        starts = dict(zip(bucket.parameters, bucket.starts, strict=True))
        specs = self._plan.specs
        return [
            whole[starts[i] :].as_strided(specs[i].shape, specs[i].strides).clone() for i in wanted
        ]

    def _gather_values(
        self, number: int, name: str, kind: _OnDevice, wanted: Sequence[int]
    ) -> list[torch.Tensor]:
        """Gather the tensors that parameters of a bucket have under a name."""
        count = (len(wanted), *kind.shape)
        own = torch.zeros(count, dtype=kind.dtype, device=self._devices[number])
        for index in self._own(wanted):
            own[wanted.index(index)] = self._state[index][name]
        whole = from_buffer(self._slices.gather(as_buffer(own.view(-1))))
        rows = whole.view(self._slices.owners, *count)
        return [rows[self._holders[i], place].clone() for place, i in enumerate(wanted)]

    def _own(self, wanted: Sequence[int]) -> list[int]:
        return [index for index in wanted if index in self._state]


class ScatteredUpdate(UserState):
    """Takes the optimizer's step on the segments that this rank owns, and gathers the weights.

    Each rank keeps a copy of the weights that it owns, and their state: ZeRO, stage 1 (Rajbhandari
    et al., arXiv 1910.02054). The state is either with the segments or, after give_back() and until
    the next step, in the user's optimizer.
    """

    shared = True
    nodes = 1

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        buckets: ParameterBuckets,
        slices: ScatteredSlices,
    ) -> None:
        for spec in buckets.plan.specs:
            if spec.dtype.value != spec.kind:
                raise UnsupportedError(
                    f"sharded=True: parameter {spec.name!r} is {spec.kind}, and its gradient is "
                    f"reduced in {spec.dtype.value}: use sharded=False, or an engine that reduces "
                    f"{spec.kind}"
                )
        super().__init__(optimizer, [parameter for _, parameter in buckets.named])
        self.buckets, self._slices = buckets, slices
        self._plan: BucketPlan | None = None
        self._whole: dict[int, _Entry] | None = None  # the state of all ranks, until the next step

    @collective
    def step(self, kept: bool) -> None:
        """Update the weights of all ranks with the gradients of the owners."""
        self._prepare()
        self._whole = None
        for index, tensor in self._tensors.items():
            tensor.copy_(self._segment_of(index, self._parameters[index]))
        self._steps.step(kept=kept)
        name = f"weights of {self.buckets.reducer.name}"
        self.buckets.run(GatherSlices(self._slices, self._parts, self._receive, name))

    def _segment_of(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements of a tensor of a parameter's shape, 1-d."""
        segment = self._owned[index]
        elements = in_memory_order(tensor, self.buckets.plan.specs[index])
        return elements[segment.first : segment.first + segment.count]

    def _receive(self, number: int, weights: Buffer) -> None:
        """Take the weights of a bucket's parameters, if they were updated."""
        bucket, specs = self.buckets.plan.buckets[number], self.buckets.plan.specs
        elements = from_buffer(weights)
        targets, views = [], []
        for index, start in zip(bucket.parameters, bucket.starts, strict=True):
            parameter, spec = self._parameters[index], specs[index]
            if parameter.grad is not None and spec.count:
                targets.append(parameter.detach())
                views.append(elements[start:].as_strided(spec.shape, spec.strides))
        if targets:
            torch._foreach_copy_(targets, views)

    @collective
    def _prepare(self) -> None:
        """Follow a new plan, and take the state that the optimizer was given."""
        if self._plan is not self.buckets.plan:
            self.give_back()
            self._cut()
            self._plan, self._given = self.buckets.plan, True
        if self.given:
            self._take()

    def _cut(self) -> None:
        """Divide weights and gradients into segments."""
        plan, slices = self.buckets.plan, self._slices
        self._owned = {s.parameter: s for s in segments_of(plan, slices.owners)[slices.number]}
        buffers = self.buckets.reducer.buffers
        self._parts = [buffer.like(slices.length(buffer.count)) for buffer in buffers]
        for part in self._parts:
            part.zero()  # also what follows the last slice, and is sent with it
        parts = [from_buffer(part) for part in self._parts]
        self._devices = [part.device for part in parts]
        lows = [slices.own(buffer.count)[0] for buffer in buffers]
        self._tensors = {
            index: parts[s.bucket][s.start - lows[s.bucket] :][: s.count]
            for index, s in self._owned.items()
        }
        self._steps = SegmentSteps(self._optimizer, self.buckets, self._owned, self._tensors)

    def _take(self) -> None:
        """Move the state from the user's optimizer to the segments."""
        state = {}
        for index in self._owned:
            entry = self._optimizer.state.get(self._parameters[index])
            if entry:
                state[index] = {
                    name: self._part_of(index, name, value) for name, value in entry.items()
                }
        self._steps.use_state(state)
        self.withdraw()

    def _part_of(self, index: int, name: str, value: Any) -> Any:
        """Return a copy of what belongs to this rank's segment of something in a state."""
        if is_elementwise(name, value, self._parameters[index].shape):
            part = self._segment_of(index, value)
            like = self._tensors[index]
            # As load_state_dict() does, state follows a parameter whose type has changed.
            dtype = like.dtype if part.is_floating_point() else part.dtype
            return part.to(like.device, dtype, copy=True)
        return value.clone() if isinstance(value, torch.Tensor) else value

    @collective
    def give_back(self) -> None:
        """Move the whole state into every user's optimizer, until the next step."""
        if not self.given:
            self._give(self._gather(None))

    def give_consolidated(self) -> bool:
        """Move the whole state into the user's optimizer, and return whether it is here."""
        if self._whole is not None and not self.given:
            self._give(self._whole)
        return self._given

    def _give(self, whole: dict[int, _Entry]) -> None:
        self._given = True
        for index in sorted(whole):
            self._optimizer.state[self._parameters[index]] = whole[index]

    @collective
    def consolidate(self, to: int) -> None:
        """Bring the whole state to one member, for give_consolidated()."""
        if not self.given:
            whole = self._gather(to)
            self._whole = whole if to == self._slices.number else None

    @collective
    def _gather(self, to: int | None) -> dict[int, _Entry]:
        assert self._plan is not None
        buckets, streams = self.buckets, self.buckets.streams
        state, name = self._steps.state, buckets.reducer.name
        operation = GatherStates(
            name, self._slices, self._plan, self._owned, state, self._devices, to
        )
        found: dict[int, _Entry] = buckets.run(operation)
        for index, entry in found.items():
            for value in entry.values():
                if isinstance(value, torch.Tensor) and not value.is_cpu:
                    streams[self._plan.specs[index].device].hand_over(value)
        return found

    @collective
    def gradients(self) -> list[torch.Tensor]:
        """Return the reduced gradients that this rank owns (collective after a new plan)."""
        self._prepare()
        return self._steps.gradients()

    def scale(self, factor: torch.Tensor) -> None:
        """Multiply the reduced gradients that this rank owns."""
        own = self._steps.gradients()
        if own:
            torch._foreach_mul_(own, factor)

    @collective
    def norm(self, kind: float) -> torch.Tensor:
        """Return the norm of all reduced gradients together, float64 []."""
        own, largest = self.gradients(), math.isinf(kind)
        device = self._devices[0] if self._devices else torch.device("cpu")
        total = torch.zeros(1, dtype=torch.float64, device=device)
        if own:
            norms = [norm.to(device, torch.float64) for norm in torch._foreach_norm(own, kind)]
            stacked = torch.stack(norms)
            total[0] = stacked.max() if largest else stacked.pow(kind).sum()
        op = ReduceOp.MAX if largest else ReduceOp.SUM
        name = f"norm of {self.buckets.reducer.name}"
        self.buckets.run(Allreduce([as_buffer(total)], [(1,)], op, name))
        return total[0] if largest else total[0].pow(1.0 / kind)
