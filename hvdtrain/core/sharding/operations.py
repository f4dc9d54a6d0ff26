"""Operations with which owners give their slices to other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hvdtrain.buffer import Buffer
from hvdtrain.core.agreement.operation import Operation
from hvdtrain.core.agreement.request import Request
from hvdtrain.core.places.placed_bucket import PlacedBucket
from hvdtrain.core.sharding.exchange import OwnedSlices
from hvdtrain.core.sharding.scattered import ScatteredSlices
from hvdtrain.engines.communicator import Communicator


@dataclass(frozen=True)
class SlicedBuckets:
    """Buckets of which each rank owns a slice."""

    buffers: Sequence[Buffer]
    placed: Sequence[PlacedBucket | None]
    slices: OwnedSlices

    def request(self, kind: str, name: str) -> Request:
        """Return the request of an operation on them."""
        return Request(kind, name, (("buffers", str(len(self.buffers))),))

    def __iter__(self) -> Iterator[tuple[Buffer, PlacedBucket | None]]:
        return zip(self.buffers, self.placed, strict=True)


class SumSlices(Operation):
    """Sum the slice of each rank in some buckets."""

    def __init__(self, buckets: SlicedBuckets, scales: tuple[float, float], name: str) -> None:
        super().__init__()
        self._buckets, self._scales = buckets, scales
        self.request = buckets.request("sum slices", name)

    def execute(self, communicator: Communicator) -> None:
        for buffer, placed in self._buckets:
            if placed is None:
                self._buckets.slices.reduce(buffer, *self._scales)
            else:
                placed.reduce(*self._scales, everywhere=False)


class SpreadSlices(Operation):
    """Copy each slice of some buckets from its owner to all ranks that it was reduced for."""

    def __init__(self, buckets: SlicedBuckets, name: str) -> None:
        super().__init__()
        self._buckets = buckets
        self.request = buckets.request("spread", name)

    def execute(self, communicator: Communicator) -> None:
        for buffer, placed in self._buckets:
            if placed is None:
                self._buckets.slices.spread(buffer)
            else:
                placed.spread()


class GatherSlices(Operation):
    """Bring the slices of all ranks together, of one buffer after the other."""

    def __init__(
        self,
        slices: ScatteredSlices,
        parts: Sequence[Buffer],
        receive: Callable[[int, Buffer], None],
        name: str,
    ) -> None:
        super().__init__()
        self._slices, self._parts, self._receive = slices, parts, receive
        self.request = Request("gather", name, (("buffers", str(len(parts))),))

    def execute(self, communicator: Communicator) -> None:
        for number, part in enumerate(self._parts):
            self._receive(number, self._slices.gather(part))


class PutSegments(Operation):
    """Write what this rank owns into the memory of the other ranks of its node."""

    def __init__(
        self,
        pairs: Sequence[tuple[Buffer, Buffer]],
        write: Callable[[], None] | None,
        name: str,
    ) -> None:
        super().__init__()
        self._pairs, self._write = pairs, write
        self.request = Request("put", name, ())

    def execute(self, communicator: Communicator) -> None:
        slices = communicator.slices()
        assert slices is not None  # as when the memory was allocated
        if self._write is not None:
            self._write()
        for own, place in self._pairs:
            communicator.put(own, place)
        slices.meet()
