"""Operations with which owners give their slices to the other ranks of their nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hvdtrain.buffer import Buffer
from hvdtrain.core.agreement.operation import Operation
from hvdtrain.core.agreement.request import Request
from hvdtrain.engines.communicator import Communicator

__all__ = ["PutSegments", "SpreadSlices", "SumSlices"]


class SumSlices(Operation):
    """Sum the slice of each rank in some buffers.

    Args:
        buffers: buffers in memory of the communicator.
        scales: factor of this rank's elements before the sum, and the one after it.
        name: name of the operation, equal on all members.
    """

    def __init__(self, buffers: Sequence[Buffer], scales: tuple[float, float], name: str) -> None:
        super().__init__()
        self._buffers, self._scales = buffers, scales
        self.request = Request("sum slices", name, (("buffers", str(len(buffers))),))

    def execute(self, communicator: Communicator) -> None:
        slices = communicator.slices()
        assert slices is not None  # as when the memory was allocated
        for buffer in self._buffers:
            slices.reduce(buffer, *self._scales)


class SpreadSlices(Operation):
    """Copy each slice of some buffers from its owner to all ranks of the node.

    Args:
        buffers: buffers in memory of the communicator.
        name: name of the operation, equal on all members.
    """

    def __init__(self, buffers: Sequence[Buffer], name: str) -> None:
        super().__init__()
        self._buffers = buffers
        self.request = Request("spread", name, (("buffers", str(len(buffers))),))

    def execute(self, communicator: Communicator) -> None:
        slices = communicator.slices()
        assert slices is not None  # as when the buffers were reduced
        for buffer in self._buffers:
            slices.spread(buffer)


class PutSegments(Operation):
    """Write what this rank owns into the memory of the other ranks of its node.

    Args:
        pairs: memory of this rank, and its place on another one, as accessed here.
        write: function that writes more, into the memory of all ranks.
        name: name of the operation, equal on all members.
    """

    def __init__(
        self, pairs: Sequence[tuple[Buffer, Buffer]], write: Callable[[], object], name: str
    ) -> None:
        super().__init__()
        self._pairs, self._write = pairs, write
        self.request = Request("put", name, ())

    def execute(self, communicator: Communicator) -> None:
        slices = communicator.slices()
        assert slices is not None  # as when the memory was allocated
        self._write()
        for own, place in self._pairs:
            communicator.put(own, place)
        slices.meet()
