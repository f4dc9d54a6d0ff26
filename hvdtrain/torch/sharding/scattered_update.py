"""The optimizer's step, shared by ranks that share no memory, also on devices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core.agreement.operation import Request, Work
from hvdtrain.core.allreduce import Allreduce
from hvdtrain.core.gradients.plan import STEP
from hvdtrain.core.sharding.exchange import ScatteredSlices
from hvdtrain.core.sharding.segments import GatheredBucket
from hvdtrain.engines.communicator import Communicator
from hvdtrain.errors import UnsupportedError
from hvdtrain.torch.buckets import ParameterBuckets
from hvdtrain.torch.operations.routes import as_buffer, from_buffer
from hvdtrain.torch.sharding.segment_optimizer import is_elementwise
from hvdtrain.torch.sharding.state_memory import Entry, in_memory_order
from hvdtrain.torch.sharding.update import OwnerUpdate, power_sum
from hvdtrain.types import ReduceOp


@dataclass(frozen=True)
class _Gathered:
    """What stands for a tensor of an optimizer's state before it is gathered.

    With a shape the tensor is on a device, and the same for all segments of the parameter.
    Otherwise it has a number for each element of the parameter.
    """

    dtype: torch.dtype
    shape: torch.Size | None = None


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
        self._step_on_segments(kept)
        details = (("buffers", str(len(self._parts))),)
        request = Request("gather", f"weights of {self.buckets.name}", details)
        self.buckets.run(Work(request, self._gather_weights))

    @collective
    def _gather_weights(self, communicator: Communicator) -> None:
        for number, part in enumerate(self._parts):
            self._receive(number, self._slices.gather(part, self._layouts[number].counts))

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

    def _cut(self) -> Mapping[int, torch.Tensor]:
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
            for index, s in self._owned.items()
        }

    def _keep(self, index: int, entry: Entry) -> Entry:
        return {name: self._copied(index, name, value) for name, value in entry.items()}

    def _copied(self, index: int, name: str, value: Any) -> Any:
        if is_elementwise(name, value, self._parameters[index].shape):
            return self._part_of(index, value).to(self._tensors[index].device, copy=True)
        return value.clone() if isinstance(value, torch.Tensor) else value

    @collective
    def _whole_state(self) -> Mapping[int, Entry]:
        return self._gather(None)

    def give_consolidated(self) -> bool:
        if self._whole is not None and not self.given:
            self._give(self._whole)
        return self._given

    @collective
    def consolidate(self, to: int) -> None:
        if not self.given:
            whole = self._gather(to)
            self._whole = whole if to == self._slices.number else None

    @collective
    def _gather(self, to: int | None) -> dict[int, Entry]:
        """Bring the state of all parameters together, on every rank or on one.

        It takes the place of a step of the plan, so that a rank which submits a step gets an error,
        as the others do.
        """
        buckets, whom = self.buckets, "all members" if to is None else f"member {to}"
        request = Request(STEP, buckets.name, (("optimizer state for", whom),))
        found: dict[int, Entry] = buckets.run(Work(request, partial(self._gather_state, to)))
        for index, entry in found.items():
            for value in entry.values():
                if isinstance(value, torch.Tensor) and not value.is_cpu:
                    buckets.streams_of[buckets.plan.specs[index].device].hand_over(value)
        return found

    @collective
    def _gather_state(self, to: int | None, communicator: Communicator) -> dict[int, Entry]:
        assert self._plan is not None
        kept = self._inner.state
        state = {index: kept[t] for index, t in self._tensors.items() if kept.get(t)}
        outline = {
            index: {name: self._outline(index, name, value) for name, value in entry.items()}
            for index, entry in state.items()
        }
        found: dict[int, Entry] = {}
        holders: dict[int, int] = {}  # a rank with a segment of each parameter
        for rank, theirs in enumerate(communicator.gather_objects(outline)):
            found |= {index: dict(entry) for index, entry in sorted(theirs.items())}
            holders |= dict.fromkeys(theirs, rank)
        for number, bucket in enumerate(self._plan.buckets):
            entries = {index: found[index] for index in bucket.parameters if index in found}
            items = [item for entry in entries.values() for item in entry.items()]
            # In the same order on all ranks.
            for name, kind in dict.fromkeys(i for i in items if isinstance(i[1], _Gathered)):
                wanted = [index for index, entry in entries.items() if entry.get(name) == kind]
                own = {index: state[index][name] for index in wanted if index in state}
                if kind.shape is None:
                    tensors = self._gather_elements(number, kind.dtype, wanted, own)
                else:
                    whose = {index: holders[index] for index in wanted}
                    tensors = self._gather_values(number, kind.dtype, kind.shape, whose, own)
                for index, tensor in tensors.items():
                    found[index][name] = tensor
        return found if to is None or to == self._slices.number else {}

    def _outline(self, index: int, name: str, value: Any) -> Any:
        """Return a value, or what stands for it before it is gathered."""
        if is_elementwise(name, value, self._tensors[index].shape):
            return _Gathered(value.dtype)
        on_device = isinstance(value, torch.Tensor) and not value.is_cpu
        return _Gathered(value.dtype, value.shape) if on_device else value

    @collective
    def _gather_elements(
        self,
        number: int,
        dtype: torch.dtype,
        wanted: Sequence[int],
        own: Mapping[int, torch.Tensor],
    ) -> dict[int, torch.Tensor]:
        """Gather tensors of parameters of a bucket, of which each owner has its elements."""
        layout, specs, owner = self._layouts[number], self.buckets.plan.specs, self._slices.number
        part = torch.zeros(layout.counts[owner], dtype=dtype, device=self._devices[number])
        for index, value in own.items():
            segment = self._owned[index]
            elements = in_memory_order(value, specs[index]) if segment.whole else value
            part[layout.place(segment, owner)] = elements
        whole = from_buffer(self._slices.gather(as_buffer(part), layout.counts))
        starts = {index: whole[layout.starts[index] :] for index in wanted}
        return {
            i: t.as_strided(specs[i].shape, specs[i].strides).clone() for i, t in starts.items()
        }

    @collective
    def _gather_values(
        self,
        number: int,
        dtype: torch.dtype,
        shape: torch.Size,
        holders: Mapping[int, int],
        own: Mapping[int, torch.Tensor],
    ) -> dict[int, torch.Tensor]:
        """Gather tensors of parameters from the ranks that hold them, without the host."""
        part = torch.zeros((len(holders), *shape), dtype=dtype, device=self._devices[number])
        for place, index in enumerate(holders):
            if index in own:
                part[place] = own[index]
        whole = from_buffer(self._slices.gather(as_buffer(part.view(-1))))
        rows = whole.view(self._slices.owners, *part.shape)
        return {index: rows[rank, n].clone() for n, (index, rank) in enumerate(holders.items())}

    def scale(self, factor: torch.Tensor) -> None:
        own = self._own_gradients()
        if own:
            torch._foreach_mul_(own, factor)

    @collective
    def norm(self, kind: float) -> torch.Tensor:
        self._prepare()
        own, largest = self._own_gradients(), math.isinf(kind)
        device = self._devices[0] if self._devices else torch.device("cpu")
        total = power_sum(own, kind, device)
        op = ReduceOp.MAX if largest else ReduceOp.SUM
        name = f"norm of {self.buckets.name}"
        self.buckets.run(Allreduce([as_buffer(total)], [(1,)], op, name))
        return total if largest else total.pow(1.0 / kind)
