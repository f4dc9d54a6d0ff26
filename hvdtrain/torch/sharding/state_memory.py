"""The optimizer's state of a node's ranks, in memory that all of them can read (all local)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hvdtrain.collective import collective
from hvdtrain.core.gradients.plan import ParameterSpec
from hvdtrain.core.sharding.owners import NodeOwners, StateMemory
from hvdtrain.core.sharding.segments import Quantity, Segment


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
