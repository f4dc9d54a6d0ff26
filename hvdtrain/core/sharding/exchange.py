"""The exchange of a shared optimizer step: each owner gets the average or sum of its slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from hvdtrain.buffer import Buffer, Elements
from hvdtrain.collective import collective
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.agreement.operation import Operation, Request, Work
from hvdtrain.core.gradients.communicators import Communicators
from hvdtrain.core.gradients.exchange import AllreduceExchange, FilledBucket, StepInfo
from hvdtrain.core.places import PlacedBucket
from hvdtrain.engines.communicator import Communicator, Slices, aligned_bounds
from hvdtrain.types import DType, ReduceOp


class ScatteredSlices:
    """Slices that a communicator scatters and gathers on the buffer's device; one each rank."""

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
    def gather(self, part: Buffer, counts: Sequence[int] | None = None) -> Buffer:
        """Return the parts of all ranks, one after the other, which are equally long by default."""
        counts = [part.count] * self.owners if counts is None else counts
        whole = self._of("send", part, sum(counts))
        self._communicator.allgather(part, whole, counts)
        return whole

    def _of(self, use: str, buffer: Buffer, count: int) -> Buffer:
        """Return memory of the type and on the device of a buffer, the same for each call."""
        key = (use, buffer.device, buffer.dtype)
        kept = self._scratch.get(key)
        if kept is None or kept.count < count:
            kept = self._scratch[key] = buffer.like(count)
            kept.zero()
        return kept.slice(0, count)


# Types of the weights that the compiled kernel updates.
KERNEL_TYPES = (DType.FLOAT32, DType.FLOAT64)
# Slices in memory that the ranks of a node share, or in that of each rank.
OwnedSlices: TypeAlias = Slices | ScatteredSlices


def owned_slices(channel: Channel, memory: Mapping[str, Elements]) -> OwnedSlices | None:
    """Return the slices of a plan's buckets, or None on all ranks that cannot share work."""
    slices = channel.communicator.slices()
    on_host = set(memory) == {"cpu"}
    if slices is not None and slices.owners > 1 and on_host and slices.copies(memory["cpu"]):
        return slices
    if len(channel.ranks) == 1:
        return None
    places = {kind: Buffer.of(elements).device for kind, elements in memory.items()}
    staged = any(place.partition(":")[0] != kind for kind, place in places.items())
    return None if staged else ScatteredSlices(channel.communicator)


class ShardedExchange(AllreduceExchange):
    """The average or sum, of which only the owner of a slice gets its result.

    Every rank gets all results if owners have whole parameters. A joined rank cannot take part,
    because it would have to update the weights that it owns.
    """

    stateless = False

    def __init__(
        self,
        slices: OwnedSlices,
        op: ReduceOp = ReduceOp.AVERAGE,
        predivide: float = 1.0,
        whole_tensors: bool = False,
    ) -> None:
        super().__init__(op, predivide)
        self._plain_spec = self.spec
        self.slices, self.whole_tensors = slices, whole_tensors
        self.whole = True
        self.pending: set[int] = set()
        self.scales = (1.0, 1.0)
        self.defer_to(None)

    def defer_to(self, board: np.typing.NDArray[np.float64] | None) -> None:
        """Leave sums of real numbers to the optimizer's step, on all ranks, from the next one on.

        `board` has the factor of this rank's gradients, [1]; None to sum as gradients arrive.
        """
        self._board, self.at_once = board, board is not None
        form = ",whole" * self.whole_tensors + ",deferred" * (board is not None)
        self.spec = f"{self._plain_spec},sharded{form}"

    @collective
    def reduce(self, bucket: FilledBucket, info: StepInfo, communicators: Communicators) -> None:
        if bucket.number == 0:
            self.pending.clear()
        if self.whole:
            super().reduce(bucket, info, communicators)
        elif self._board is not None and bucket.buffer.dtype in KERNEL_TYPES:
            # The sum of the step's numbers, at its end, is where ranks meet.
            self.scales = self.factors(info)
            self._board[0] = self.scales[0]
            self.pending.add(bucket.number)
        else:
            sum_slice(self.slices, bucket.buffer, bucket.placed, self.factors(info))

    def on_slices(
        self,
        buckets: Sequence[tuple[Buffer, PlacedBucket | None]],
        name: str,
        scales: tuple[float, float] | None = None,
    ) -> Operation:
        """Return the operation in which each rank sums its slice of some buckets.

        Without factors each slice is copied from its owner to all ranks that it was reduced for.
        """

        def work(communicator: Communicator) -> None:
            for buffer, placed in buckets:
                if scales is not None:
                    sum_slice(self.slices, buffer, placed, scales)
                else:
                    self.slices.spread(buffer) if placed is None else placed.spread()

        kind = "spread" if scales is None else "sum slices"
        return Work(Request(kind, name, (("buffers", str(len(buckets))),)), work)

    def zeros(self, kinds: Sequence[tuple[int, DType]]) -> None:  # type: ignore[override]
        return None


@collective
def sum_slice(
    slices: OwnedSlices, buffer: Buffer, placed: PlacedBucket | None, scales: tuple[float, float]
) -> None:
    """Sum this rank's slice of a bucket, whose gradients lie elsewhere if it is placed."""
    if placed is None:
        slices.reduce(buffer, *scales)
    else:
        placed.reduce(*scales, everywhere=False)
