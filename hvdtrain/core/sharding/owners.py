"""The ranks of a node that own slices of parameters, and their memory of the optimizer's state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.agreement.operation import Request, Work
from hvdtrain.core.allreduce import Allreduce
from hvdtrain.core.gathers import allocate
from hvdtrain.core.sharding.segments import Quantity, Segment, StateLayout
from hvdtrain.engines.communicator import Communicator, Slices
from hvdtrain.types import ReduceOp

_Bytes = npt.NDArray[np.uint8]


class NodeOwners:
    """What the ranks of a node that share an optimizer's step do together."""

    def __init__(self, channel: Channel, slices: Slices, name: str) -> None:
        self.channel, self.slices, self.name = channel, slices, name
        self.number = slices.number

    @collective
    def find_memory(self, nbytes: int, purpose: str) -> list[_Bytes] | None:
        """Allocate memory on each rank; return that of all ranks, or None if it is not shared."""
        name = f"of the {purpose} of {self.name}"
        return self.slices.copies(self.channel.run(allocate(nbytes, name)))

    @collective
    def allocate(self, nbytes: int, purpose: str) -> list[_Bytes]:
        """Allocate memory on each rank; return that of all ranks."""
        return require_shared(self.find_memory(nbytes, purpose), nbytes, purpose)

    @collective
    def total(self, own: float, op: ReduceOp = ReduceOp.SUM) -> float:
        """Return the sum, or the maximum, of what each rank has found for its segments."""
        total = np.array([own], np.float64)
        name = f"norm of {self.name}"
        self.channel.run(Allreduce([Buffer.from_array(total)], [total.shape], op, name))
        # Every node has all slices, and has counted them.
        return float(total[0] if op is ReduceOp.MAX else total[0] / self.slices.nodes)

    @collective
    def put(
        self,
        what: str,
        pairs: Sequence[tuple[Buffer, Buffer]] = (),
        write: Callable[[], None] | None = None,
    ) -> None:
        """Write what this rank owns to the other ranks; all have written at the return."""

        def work(communicator: Communicator) -> None:
            if write is not None:
                write()
            for own, place in pairs:
                communicator.put(own, place)
            self.slices.meet()

        self.channel.run(Work(Request("put", f"{what} of {self.name}"), work))


def require_shared(copies: list[_Bytes] | None, nbytes: int, purpose: str) -> list[_Bytes]:
    """Return all ranks' copies of memory."""
    if copies is None:
        raise RuntimeError(
            f"sharded=True: {nbytes >> 10:,} KiB for the {purpose} cannot be shared on this node: "
            "free memory, or use sharded=False (in train --no-shard-optimizer)"
        )
    return copies


class StateMemory:
    """The state of all segments of a node, each in the memory of its owner (local to use)."""

    @collective
    def __init__(
        self,
        owners: NodeOwners,
        segments: Sequence[Sequence[Segment]],
        quantities: Sequence[Mapping[str, Quantity]],
    ) -> None:
        self._segments, self.quantities, self._number = segments, quantities, owners.number
        self._layouts = [StateLayout.of(own, quantities) for own in segments]
        nbytes = max(1, *(layout.nbytes for layout in self._layouts))
        self.owned = segments[self._number] if self._number < len(segments) else []
        self._memories = owners.allocate(nbytes, "optimizer's state")

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
