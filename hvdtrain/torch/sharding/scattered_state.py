"""The optimizer's state of all ranks' segments, brought together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvdtrain.core.agreement.operation import Operation
from hvdtrain.core.agreement.request import Request
from hvdtrain.core.agreement.votes import exchange
from hvdtrain.core.gradients.plan import STEP, Bucket, BucketPlan
from hvdtrain.core.sharding.scattered import ScatteredSlices
from hvdtrain.core.sharding.segments import Segment
from hvdtrain.engines.communicator import Communicator
from hvdtrain.torch.sharding.segment_optimizer import is_elementwise
from hvdtrain.torch.tensors.buffers import as_buffer, from_buffer

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
