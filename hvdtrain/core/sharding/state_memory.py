"""Memory of an optimizer's state that all ranks of a node can read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from hvdtrain.buffer import Buffer, Elements
from hvdtrain.collective import collective
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.collectives.memory import AllocateMemory
from hvdtrain.core.sharding.segments import Quantity, Segment, StateLayout
from hvdtrain.engines.features import Slices

_Bytes = npt.NDArray[np.uint8]


@collective
def allocate_shared(
    channel: Channel, slices: Slices, nbytes: int, purpose: str, name: str
) -> list[_Bytes]:
    """Allocate memory on each rank; return that of all ranks of the node."""
    memory = channel.run(AllocateMemory(nbytes, f"of the {purpose} of {name}"))
    return require_shared(slices, memory, purpose)


def require_shared(slices: Slices, memory: Elements, purpose: str) -> list[_Bytes]:
    """Return all ranks' copies of memory that each has allocated."""
    copies = slices.copies(memory)
    if copies is None:
        raise RuntimeError(
            f"sharded=True: {Buffer.of(memory).nbytes >> 10:,} KiB for the {purpose} cannot be "
            "shared on this node: free memory, or use sharded=False (in train "
            "--no-shard-optimizer)"
        )
    return copies


class StateMemory:
    """The state of all segments of a node, each in the memory of its owner (local)."""

    def __init__(
        self,
        segments: Sequence[Sequence[Segment]],
        quantities: Sequence[Mapping[str, Quantity]],
        number: int,
    ) -> None:
        self._segments, self.quantities, self._number = segments, quantities, number
        self._layouts = [StateLayout(own, quantities) for own in segments]
        self.nbytes = max(1, *(layout.nbytes for layout in self._layouts))
        self.owned = segments[number] if number < len(segments) else []

    def use(self, memories: Sequence[_Bytes]) -> None:
        """Use memory of `nbytes` on each rank."""
        self._memories = memories

    def clear(self) -> None:
        """Forget the state of this rank's segments."""
        self._memories[self._number][: len(self.owned)] = 0

    def note(self, index: int) -> None:
        """Note that there is a state of this rank's segment of a parameter."""
        self._memories[self._number][self._layouts[self._number].numbers[index]] = 1

    def exists(self, index: int) -> bool:
        """Return whether there is a state of each segment of a parameter."""
        found = [
            memory[layout.numbers[index]]
            for memory, layout in zip(self._memories, self._layouts, strict=False)
            if index in layout.numbers
        ]
        return bool(found) and all(found)

    def parts(self, index: int, name: str) -> list[tuple[Segment, _Bytes]]:
        """Return the segments of a parameter with the memory of a quantity of each."""
        return [
            (self._segments[owner][number], self._part(owner, index, name))
            for owner, layout in enumerate(self._layouts)
            if (number := layout.numbers.get(index)) is not None
        ]

    def own(self, index: int, name: str) -> _Bytes:
        """Return the memory of a quantity of this rank's segment of a parameter."""
        return self._part(self._number, index, name)

    def _part(self, owner: int, index: int, name: str) -> _Bytes:
        quantity, layout = self.quantities[index][name], self._layouts[owner]
        count = quantity.count(self._segments[owner][layout.numbers[index]].count)
        start = layout.offsets[index, name]
        return self._memories[owner][start : start + count * quantity.dtype.itemsize]
