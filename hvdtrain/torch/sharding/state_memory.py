"""The optimizer's state of a node's ranks, in memory that all of them can read (all local)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core.gradients.plan import ParameterSpec
from hvdtrain.core.sharding.owners import NodeOwners, StateMemory
from hvdtrain.core.sharding.segments import Quantity, Segment
from hvdtrain.errors import UnsupportedError
from hvdtrain.torch.tensors.routes import as_buffer, from_buffer

_ALIGNMENT_BYTES = 128


class WeightMemory:
    """The weights of this rank in shared memory, and those of the others as accessed here.

    Each rank has its own copy of all weights. `p.data` becomes a view of the memory.
    """

    @collective
    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        specs: Sequence[ParameterSpec],
        owners: NodeOwners,
    ) -> None:
        _check_memory(parameters, specs)
        self._parameters, self._specs = parameters, specs
        starts, end = [], 0
        for spec in specs:
            starts.append(end)
            end += -(-spec.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        copies = owners.find_memory(max(1, end), "weights")
        self.shared = copies is not None
        if copies is None:
            return
        buffers = [
            [
                Buffer.of(copy[start : start + spec.nbytes]).view(spec.dtype)
                for start, spec in zip(starts, specs, strict=True)
            ]
            for copy in copies
        ]
        self._own = buffers.pop(owners.number)
        self._others = buffers
        self._elements = [from_buffer(buffer) for buffer in self._own]
        self.follow()

    def follow(self) -> None:
        """Move weights into the memory whose parameter has another one, with their values."""
        for parameter, own, spec in zip(self._parameters, self._own, self._specs, strict=True):
            if parameter.data_ptr() == own.pointer or not spec.count:
                continue
            weights = parameter.detach()
            # Not of `_elements`, which would move with p.data.share_memory_().
            view = from_buffer(own).as_strided(spec.shape, spec.strides)
            if weights.shape != view.shape or weights.dtype != view.dtype or not weights.is_cpu:
                raise UnsupportedError(
                    f"sharded=True: parameter {spec.name!r} was {view.dtype} {tuple(view.shape)} "
                    f"on the CPU and is {weights.dtype} {tuple(weights.shape)} on {weights.device} "
                    "now: wrap the optimizer again"
                )
            view.copy_(weights)
            parameter.data = view

    def segment(self, segment: Segment) -> torch.Tensor:
        """Return this rank's elements of a segment, 1-d."""
        return self._elements[segment.parameter][segment.in_parameter]

    def addresses(self, segment: Segment) -> list[int]:
        """Return the address of a segment on each rank, as accessed here, this rank's first."""
        first = segment.first * self._specs[segment.parameter].dtype.itemsize
        copies = [self._own, *self._others]
        return [buffers[segment.parameter].pointer + first for buffers in copies]

    def places(self, segment: Segment) -> list[tuple[Buffer, Buffer]]:
        """Return this rank's elements of a segment with their place on each other rank."""
        own = as_buffer(self.segment(segment))
        return [
            (own, buffers[segment.parameter].slice(segment.first, segment.count))
            for buffers in self._others
        ]


def _check_memory(parameters: Sequence[torch.nn.Parameter], specs: Sequence[ParameterSpec]) -> None:
    """Check that nothing else refers to the memory of the parameters, which they leave."""
    owners: dict[int, str] = {}
    for parameter, spec in zip(parameters, specs, strict=True):
        if spec.device != "cpu" or spec.dtype.value != spec.kind:
            raise UnsupportedError(
                f"sharded=True: parameter {spec.name!r} is {spec.kind} on {spec.device}, and only "
                "parameters on the CPU whose gradients are reduced in their own type can be "
                "shared: use sharded=False"
            )
        storage = parameter.untyped_storage()
        other = owners.setdefault(storage.data_ptr(), spec.name) if spec.count else spec.name
        if other != spec.name or storage.nbytes() != spec.nbytes:
            what = "a larger tensor" if other == spec.name else f"parameter {other!r}"
            raise UnsupportedError(
                f"sharded=True: parameter {spec.name!r} shares its memory with {what}, but "
                "weights move to memory of the node: give it memory of its own, p.data = "
                "p.data.clone(), or use sharded=False"
            )


def in_memory_order(tensor: torch.Tensor, spec: ParameterSpec) -> torch.Tensor:
    """Return the elements in the order in which the parameter has them in memory, 1-d."""
    if tuple(tensor.stride()) != spec.strides:
        whole = torch.empty_strided(
            spec.shape, spec.strides, dtype=tensor.dtype, device=tensor.device
        )
        tensor = whole.copy_(tensor)
    return tensor.detach().as_strided((spec.count,), (1,))


def in_shape(elements: torch.Tensor, segment: Segment, spec: ParameterSpec) -> torch.Tensor:
    """Return the elements of a segment, 1-d, or of a whole parameter, in its shape."""
    return elements.as_strided(spec.shape, spec.strides) if segment.whole else elements


Entry = dict[str, Any]


class TorchStateMemory(StateMemory):
    """The state of all segments of a node as tensors."""

    @collective
    def __init__(
        self,
        owners: NodeOwners,
        segments: Sequence[Sequence[Segment]],
        quantities: Sequence[Mapping[str, Quantity]],
        specs: Sequence[ParameterSpec],
    ) -> None:
        super().__init__(owners, segments, quantities)
        self._specs = specs
        # Where the state of each of this rank's segments lies, by name.
        self.slots = {
            segment.parameter: {
                name: self._slot(segment, name, quantity)
                for name, quantity in self.quantities[segment.parameter].items()
            }
            for segment in self.owned
        }
        self.clear()

    def _slot(self, segment: Segment, name: str, quantity: Quantity) -> torch.Tensor:
        slot, spec = _tensor(self.own(segment.parameter, name), quantity), self._specs
        return in_shape(slot, segment, spec[segment.parameter]) if quantity.elementwise else slot

    def keep(self, index: int, entry: Entry) -> None:
        """Move the state of one of this rank's segments into the memory."""
        for name, value in entry.items():
            slot = self.slots[index].get(name)
            if value is None:  # as a checkpoint may have it
                continue
            if slot is None:
                raise RuntimeError(
                    f"the optimizer keeps {name!r} for parameter "
                    f"{self._specs[index].name!r}, which it did not when the work was shared"
                )
            if not isinstance(value, torch.Tensor):
                slot.fill_(value)
            elif value.data_ptr() != slot.data_ptr():
                slot.copy_(value)
                entry[name] = slot
        self.note(index)

    def begin(self, index: int, entry: Entry) -> bool:
        """Complete the state of one of this rank's segments with zeros in the memory."""
        missing = [name for name in self.quantities[index] if entry.get(name) is None]
        for name in missing:
            entry[name] = self.slots[index][name].zero_()
        self.note(index)
        return bool(missing)

    def read(self, index: int) -> Entry | None:
        """Return a copy of the state of a whole parameter; None if it has none."""
        if not self.exists(index):
            return None
        return {name: self._read(index, each) for name, each in self.quantities[index].items()}

    def _read(self, index: int, quantity: Quantity) -> Any:
        parts = [(s, _tensor(part, quantity)) for s, part in self.parts(index, quantity.name)]
        if not quantity.elementwise:
            value = parts[0][1]
            return value.clone() if quantity.tensor else value.item()
        spec, dtype = self._specs[index], parts[0][1].dtype
        whole = torch.empty_strided(spec.shape, spec.strides, dtype=dtype, device="cpu")
        elements = whole.as_strided((spec.count,), (1,))
        for segment, part in parts:
            elements[segment.in_parameter] = part
        return whole


def _tensor(memory: npt.NDArray[np.uint8], quantity: Quantity) -> torch.Tensor:
    dtype = getattr(torch, quantity.dtype.value)
    # torch takes no buffer without bytes.
    part = torch.frombuffer(memory, dtype=dtype) if memory.size else torch.empty(0, dtype=dtype)
    return part if quantity.elementwise else part.view(())
