"""Operations with which owners give their slices to the other ranks of their nodes."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.buffer import Buffer
from hvdtrain.core.agreement.operation import Operation
from hvdtrain.core.agreement.request import Request
from hvdtrain.core.gradients.placed_bucket import PlacedBucket
from hvdtrain.engines.communicator import Communicator

__all__ = ["PutSegments", "SpreadSlices"]


class SpreadSlices(Operation):
    """Copy each slice of some buffers from its owner to all ranks of the node.

    Args:
        buffers: buffers in memory of the communicator.
        placed: each bucket of which some gradients may lie elsewhere; None for the others.
        name: name of the operation, equal on all members.
    """

    def __init__(
        self, buffers: Sequence[Buffer], placed: Sequence[PlacedBucket | None], name: str
    ) -> None:
        super().__init__()
        self._buffers, self._placed = buffers, placed
        self.request = Request("spread", name, (("buffers", str(len(buffers))),))

    def execute(self, communicator: Communicator) -> None:
        slices = communicator.slices()
        assert slices is not None  # as when the buffers were reduced
        for buffer, placed in zip(self._buffers, self._placed, strict=True):
            if placed is None:
                slices.spread(buffer)
            else:
                placed.spread()


class PutSegments(Operation):
    """Copy what this rank owns into the memory of the other ranks of its node.

    Args:
        pairs: memory of this rank, and its place on another one, as accessed here.
        name: name of the operation, equal on all members.
    """

    def __init__(self, pairs: Sequence[tuple[Buffer, Buffer]], name: str) -> None:
        super().__init__()
        self._pairs = pairs
        self.request = Request("put", name, ())

    def execute(self, communicator: Communicator) -> None:
        slices = communicator.slices()
        assert slices is not None  # as when the memory was allocated
        for own, place in self._pairs:
            communicator.put(own, place)
        slices.meet()
