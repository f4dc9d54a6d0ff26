"""Slices of buckets in any memory, each of which has one owner among all ranks."""

from __future__ import annotations

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.engines.communicator import Communicator
from hvdtrain.engines.slices import aligned_bounds
from hvdtrain.types import DType, ReduceOp


class ScatteredSlices:
    """Slices that a communicator scatters and gathers, on the device of the buffer.

    Every rank owns the slice of its number of every buffer; `aligned_bounds` says where they begin.
    """

    nodes = 1

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self.owners, self.number = communicator.size, communicator.rank
        self._scratch: dict[tuple[str, str, DType], Buffer] = {}

    def own(self, count: int) -> tuple[int, int]:
        """Return the bounds of this rank's slice of a buffer of so many elements."""
        bounds = aligned_bounds(count, self.owners)
        return bounds[self.number], bounds[self.number + 1]

    def length(self, count: int) -> int:
        """Return the length of all slices but the last ones, which may be shorter."""
        return aligned_bounds(count, self.owners)[1]

    @collective
    def reduce(self, buffer: Buffer, prescale: float, postscale: float) -> None:
        """Overwrite this rank's slice with that of the sum over all ranks."""
        length = self.length(buffer.count)
        send = buffer
        if length * self.owners != buffer.count:  # engines scatter equal parts only
            send = self._of("send", buffer, length * self.owners)
            send.slice(0, buffer.count).copy_from(buffer)
        part = self._of("part", buffer, length)
        counts = [length] * self.owners
        self._communicator.reduce_scatter(send, part, counts, ReduceOp.SUM, prescale, postscale)
        low, high = self.own(buffer.count)
        buffer.slice(low, high - low).copy_from(part.slice(0, high - low))

    @collective
    def spread(self, buffer: Buffer) -> None:
        """Copy each slice from its owner to all ranks."""
        low, high = self.own(buffer.count)
        part = self._of("part", buffer, self.length(buffer.count))
        part.slice(0, high - low).copy_from(buffer.slice(low, high - low))
        buffer.copy_from(self.gather(part).slice(0, buffer.count))

    @collective
    def gather(self, part: Buffer) -> Buffer:
        """Return the slices of all ranks, one after the other."""
        whole = self._of("send", part, part.count * self.owners)
        self._communicator.allgather(part, whole, [part.count] * self.owners)
        return whole

    def _of(self, use: str, buffer: Buffer, count: int) -> Buffer:
        """Return memory of the type and on the device of a buffer, the same for each call."""
        key = (use, buffer.device, buffer.dtype)
        kept = self._scratch.get(key)
        if kept is None or kept.count < count:
            kept = self._scratch[key] = buffer.like(count)
            kept.zero()
        return kept.slice(0, count)
