"""The optimizer's step, shared by ranks that share no memory, also on devices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core.agreement.operation import Operation, Request
from hvdtrain.core.collectives.allreduce import Allreduce
from hvdtrain.core.gradients.plan import STEP, BucketPlan
from hvdtrain.core.sharding.exchange import GatherSlices, ScatteredSlices
from hvdtrain.core.sharding.segments import GatheredBucket, Segment
from hvdtrain.engines.communicator import Communicator
from hvdtrain.errors import UnsupportedError
from hvdtrain.torch.gradients.buckets import ParameterBuckets
from hvdtrain.torch.sharding.segment_optimizer import is_elementwise
from hvdtrain.torch.sharding.state_memory import Entry, in_memory_order
from hvdtrain.torch.sharding.update import OwnerUpdate, power_sum
from hvdtrain.torch.tensors.routes import as_buffer, from_buffer
from hvdtrain.types import ReduceOp


@dataclass(frozen=True)
class _Elements:
    """A tensor with a number for each element of the parameter."""

    dtype: torch.dtype


@dataclass(frozen=True)
class _OnDevice:
    """Another tensor on a device, the same for all segments of the parameter."""

    dtype: torch.dtype
    shape: torch.Size


_GATHERED = (_Elements, _OnDevice)


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
        layouts: Sequence[GatheredBucket],
        owned: Mapping[int, Segment],
        state: Mapping[int, Entry],
        devices: Sequence[torch.device],
        to: int | None,
    ) -> None:
        super().__init__()
        self._slices, self._plan, self._devices = slices, plan, devices
        self._layouts, self._owned, self._state = layouts, owned, state
        self._outline = {
            index: {name: self._kind(index, name, value) for name, value in entry.items()}
            for index, entry in state.items()
        }
        self._keeps = to is None or to == slices.number
        whom = "all members" if to is None else f"member {to}"
        self.request = Request(STEP, name, (("optimizer state for", whom),))

    def _kind(self, index: int, name: str, value: Any) -> Any:
        """Return a value, or what stands for it in the outline of this rank's state."""
        segment = self._owned[index]
        shape = self._plan.specs[index].shape if segment.whole else (segment.count,)
        if is_elementwise(name, value, shape):
            return _Elements(value.dtype)
        on_device = isinstance(value, torch.Tensor) and not value.is_cpu
        return _OnDevice(value.dtype, value.shape) if on_device else value

    @collective
    def execute(self, communicator: Communicator) -> dict[int, Entry]:
        found: dict[int, Entry] = {}
        holders: dict[int, int] = {}  # a rank with a segment of each parameter
        for rank, outline in enumerate(communicator.gather_objects(self._outline)):
            found |= {index: dict(entry) for index, entry in sorted(outline.items())}
            holders |= dict.fromkeys(outline, rank)
        for number, bucket in enumerate(self._plan.buckets):
            entries = {index: found[index] for index in bucket.parameters if index in found}
            items = [item for entry in entries.values() for item in entry.items()]
            # In the same order on all ranks.
            for name, kind in dict.fromkeys(i for i in items if isinstance(i[1], _GATHERED)):
                wanted = [index for index, entry in entries.items() if entry.get(name) == kind]
                if isinstance(kind, _OnDevice):
                    self._gather_values(number, name, kind, {i: holders[i] for i in wanted}, found)
                else:
                    self._gather(number, name, kind, wanted, found)
        return found if self._keeps else {}

    @collective
    def _gather(
        self,
        number: int,
        name: str,
        kind: _Elements,
        wanted: Sequence[int],
        found: Mapping[int, Entry],
    ) -> None:
        """Gather the elements that parameters of a bucket have under a name."""
        layout, specs, owner = self._layouts[number], self._plan.specs, self._slices.number
        length, device = layout.counts[owner], self._devices[number]
        part = torch.zeros(length, dtype=kind.dtype, device=device)
        for index in wanted:
            if index in self._state:
                segment, value = self._owned[index], self._state[index][name]
                value = in_memory_order(value, specs[index]) if segment.whole else value
                part[layout.place(segment, owner)] = value
        whole = from_buffer(self._slices.gather(as_buffer(part), layout.counts))
        for index in wanted:
            spec, own = specs[index], whole[layout.starts[index] :]
            found[index][name] = own.as_strided(spec.shape, spec.strides).clone()

    @collective
    def _gather_values(
        self,
        number: int,
        name: str,
        kind: _OnDevice,
        holders: Mapping[int, int],
        found: Mapping[int, Entry],
    ) -> None:
        """Gather the tensors that parameters have under a name, without a copy on the host."""
        shape = (len(holders), *kind.shape)
        own = torch.zeros(shape, dtype=kind.dtype, device=self._devices[number])
        for place, index in enumerate(holders):
            if index in self._state:
                own[place] = self._state[index][name]
        whole = from_buffer(self._slices.gather(as_buffer(own.view(-1))))
        rows = whole.view(self._slices.owners, *shape)
        for place, (index, rank) in enumerate(holders.items()):
            found[index][name] = rows[rank, place].clone()


class ScatteredUpdate(OwnerUpdate):
    """Takes the step for all ranks, and gathers the weights.

    Each rank keeps a copy of the weights that it owns, and their state: ZeRO, stage 1 (Rajbhandari
    et al., arXiv 1910.02054).
    """

    _slices: ScatteredSlices
    readable = False

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
        super().__init__(optimizer, buckets, slices)
        self._whole: dict[int, Entry] | None = None  # the state of all ranks, until the next step

    @collective
    def step(self, kept: bool) -> None:
        self._prepare()
        self._whole = None
        for index, tensor in self._tensors.items():
            tensor.copy_(self._part_of(index, self._parameters[index]))
        self._steps.step(kept=kept)
        name = f"weights of {self.buckets.name}"
        self.buckets.run(
            GatherSlices(self._slices, self._parts, self._layouts, self._receive, name)
        )

    def _receive(self, number: int, weights: Buffer) -> None:
        """Take the weights of a bucket's parameters, if they were updated."""
        specs, elements = self.buckets.plan.specs, from_buffer(weights)
        targets, views = [], []
        for index, start in self._layouts[number].starts.items():
            parameter, spec = self._parameters[index], specs[index]
            if parameter.grad is not None and spec.count:
                targets.append(parameter.detach())
                views.append(elements[start:].as_strided(spec.shape, spec.strides))
        if targets:
            torch._foreach_copy_(targets, views)

    def _cut(self, owned: Mapping[int, Segment]) -> Mapping[int, torch.Tensor]:
        plan, owner = self.buckets.plan, self._slices.number
        self._layouts = [
            GatheredBucket.of(plan, number, self._segments) for number in range(len(plan.buckets))
        ]
        self._parts = [
            buffer.like(layout.counts[owner])
            for buffer, layout in zip(self.buckets.buffers, self._layouts, strict=True)
        ]
        for part in self._parts:
            part.zero()  # also what follows the last segment, and is sent with it
        parts = [from_buffer(part) for part in self._parts]
        self._devices = [part.device for part in parts]
        return {
            index: parts[s.bucket][self._layouts[s.bucket].place(s, owner)]
            for index, s in owned.items()
        }

    def _keep(self, index: int, entry: Entry) -> Entry:
        return {name: self._copied(index, name, value) for name, value in entry.items()}

    def _copied(self, index: int, name: str, value: Any) -> Any:
        if is_elementwise(name, value, self._parameters[index].shape):
            part, like = self._part_of(index, value), self._tensors[index]
            # As load_state_dict() does, state follows a parameter whose type has changed.
            dtype = like.dtype if part.is_floating_point() else part.dtype
            return part.to(like.device, dtype, copy=True)
        return value.clone() if isinstance(value, torch.Tensor) else value

    @collective
    def _whole_state(self) -> Mapping[int, Entry]:
        return self._gather(None)

    def give_consolidated(self) -> bool:
        """Move the whole state into the user's optimizer, and return whether it is here."""
        if self._whole is not None and not self.given:
            self._give(self._whole)
        return self._given

    @collective
    def consolidate(self, to: int) -> None:
        """Bring the whole state to one member, for give_consolidated()."""
        if not self.given:
            whole = self._gather(to)
            self._whole = whole if to == self._slices.number else None

    @collective
    def _gather(self, to: int | None) -> dict[int, Entry]:
        assert self._plan is not None
        buckets, streams = self.buckets, self.buckets.streams_of
        state, name = self._steps.state, buckets.name
        where = self._slices, self._plan, self._layouts
        operation = GatherStates(name, *where, self._steps.owned, state, self._devices, to)
        found: dict[int, Entry] = buckets.run(operation)
        for index, entry in found.items():
            for value in entry.values():
                if isinstance(value, torch.Tensor) and not value.is_cpu:
                    streams[self._plan.specs[index].device].hand_over(value)
        return found

    def scale(self, factor: torch.Tensor) -> None:
        own = self._steps.gradients()
        if own:
            torch._foreach_mul_(own, factor)

    @collective
    def norm(self, kind: float) -> torch.Tensor:
        own, largest = self.gradients(), math.isinf(kind)
        device = self._devices[0] if self._devices else torch.device("cpu")
        total = power_sum(own, kind, device)
        op = ReduceOp.MAX if largest else ReduceOp.SUM
        name = f"norm of {self.buckets.name}"
        self.buckets.run(Allreduce([as_buffer(total)], [(1,)], op, name))
        return total if largest else total.pow(1.0 / kind)
