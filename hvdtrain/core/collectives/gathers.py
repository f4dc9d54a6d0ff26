"""Operations without arithmetic, and reduce-scatter: barrier, broadcast, gathers, memory."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from hvdtrain.buffer import Buffer, Elements
from hvdtrain.core.agreement.operation import Operation, Request, device_details, device_types
from hvdtrain.core.collectives.allreduce import (
    divide_truncating,
    engine_reduction,
    reduction_details,
)
from hvdtrain.engines.communicator import Communicator
from hvdtrain.types import ReduceOp


def rows_of_rank(rows: int, rank: int, size: int) -> int:
    """Return how many rows a rank receives: equally many, and lower ranks one of the remainder."""
    return rows // size + (rank < rows % size)


class ReduceScatter(Operation):
    """Reduce buffers; return this member's part of the first dimension of each in new memory."""

    def __init__(
        self,
        buffers: Sequence[Buffer],
        shapes: Sequence[Sequence[int]],
        op: ReduceOp,
        name: str,
        prescale: float = 1.0,
        postscale: float = 1.0,
        kinds: Sequence[str] | None = None,
    ) -> None:
        self._buffers, self._shapes, self._op = buffers, shapes, op
        self._prescale, self._postscale = prescale, postscale
        kinds = kinds or [buffer.dtype.value for buffer in buffers]
        devices = device_types(buffers)
        details = reduction_details(op, shapes, kinds, prescale, postscale, devices)
        self.request = Request("reducescatter", name, details)

    def execute(self, communicator: Communicator) -> list[Buffer]:
        pairs = zip(self._buffers, self._shapes, strict=True)
        return [self._reduce(communicator, buffer, shape) for buffer, shape in pairs]

    def _reduce(self, communicator: Communicator, send: Buffer, shape: Sequence[int]) -> Buffer:
        width, size = prod(shape[1:]), communicator.size
        counts = [rows_of_rank(shape[0], rank, size) * width for rank in range(size)]
        receive = send.like(counts[communicator.rank])
        op, factor, divides = engine_reduction(self._op, send.dtype, self._postscale, size)
        communicator.reduce_scatter(send, receive, counts, op, self._prescale, factor)
        if divides:
            divide_truncating(receive, size)
        return receive


class Split(Operation):
    """Create a communicator; the result is None on ranks that are not members of it.

    It is an agreed operation because engines use the old communicator to create the new one, and
    the old one may be in use by a round.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks
        self.request = Request("opening a channel", details=(("ranks", str(list(ranks))),))

    def execute(self, communicator: Communicator) -> Communicator | None:
        return communicator.split(self._ranks)


class Barrier(Operation):
    """Wait for all members; the agreement on the operation is all that it takes."""

    def __init__(self, name: str = "") -> None:
        self.request = Request("barrier", name)

    def execute(self, communicator: Communicator) -> None:
        pass


class Broadcast(Operation):
    """Overwrite the buffers of all members with the buffer of one."""

    def __init__(
        self, buffer: Buffer, shape: Sequence[int], root_rank: int, name: str, root_shown: int
    ) -> None:
        self._buffers, self._root_rank = (buffer,), root_rank
        details = (
            ("root_rank", str(root_shown)),
            ("shape", str(tuple(shape))),
            ("dtype", buffer.dtype.value),
            *device_details(device_types(self._buffers)),
        )
        self.request = Request("broadcast", name, details)

    def execute(self, communicator: Communicator) -> None:
        communicator.broadcast(self._buffers[0], self._root_rank)


class Allgather(Operation):
    """Return new memory with all members' tensors, by rank, and the first dimension of each one."""

    def __init__(
        self, buffers: Sequence[Buffer], shapes: Sequence[Sequence[int]], name: str
    ) -> None:
        self._buffers, self._shapes = buffers, shapes
        details = (
            ("shape beyond the first", ", ".join(str(tuple(shape[1:])) for shape in shapes)),
            ("dtype", ", ".join(buffer.dtype.value for buffer in buffers)),
            *device_details(device_types(buffers)),
        )
        self.request = Request("allgather", name, details)

    def execute(self, communicator: Communicator) -> list[tuple[Buffer, list[int]]]:
        own = np.array([shape[0] for shape in self._shapes], np.int64)
        every = np.empty((communicator.size, own.size), np.int64)
        communicator.allgather(
            Buffer.from_array(own), Buffer.from_array(every), [own.size] * communicator.size
        )
        return [
            self._gather(communicator, number, every[:, number].tolist())
            for number in range(own.size)
        ]

    def _gather(
        self, communicator: Communicator, number: int, rows: list[int]
    ) -> tuple[Buffer, list[int]]:
        send, width = self._buffers[number], prod(self._shapes[number][1:])
        receive = send.like(sum(rows) * width)
        communicator.allgather(send, receive, [count * width for count in rows])
        return receive, rows


class Alltoall(Operation):
    """Send part r of the first dimension to member r; return the received parts and lengths."""

    def __init__(
        self, buffer: Buffer, shape: Sequence[int], splits: Sequence[int], name: str
    ) -> None:
        self._buffers, self._splits, self._width = (buffer,), list(splits), prod(shape[1:])
        details = (
            ("shape beyond the first", str(tuple(shape[1:]))),
            ("dtype", buffer.dtype.value),
            *device_details(device_types(self._buffers)),
        )
        self.request = Request("alltoall", name, details)

    def execute(self, communicator: Communicator) -> tuple[Buffer, list[int]]:
        ones = [1] * communicator.size
        own, incoming = np.array(self._splits, np.int64), np.empty(communicator.size, np.int64)
        communicator.alltoall(Buffer.from_array(own), Buffer.from_array(incoming), ones, ones)
        received: list[int] = incoming.tolist()
        (send,), width = self._buffers, self._width
        receive = send.like(sum(received) * width)
        sent_counts, received_counts = (own * width).tolist(), (incoming * width).tolist()
        communicator.alltoall(send, receive, sent_counts, received_counts)
        return receive, received


class AllocateMemory(Operation):
    """Allocate memory that the communicator reduces fastest; the result is 1-d uint8 memory."""

    def __init__(self, nbytes: int, name: str, device: str = "cpu") -> None:
        self._size, self._device = nbytes, device
        kind = device.partition(":")[0]
        self.request = Request("memory", name, (("bytes", str(nbytes)), *device_details([kind])))

    def execute(self, communicator: Communicator) -> Elements:
        return communicator.empty(self._size, self._device)


class AllocateIfWanted(Operation):
    """Allocate such memory if all members want it; otherwise the result is None."""

    def __init__(self, nbytes: int, name: str, wanted: bool) -> None:
        self._size, self._wanted = nbytes, wanted
        self.request = Request("memory if wanted", name, (("bytes", str(nbytes)),))

    def execute(self, communicator: Communicator) -> Elements | None:
        wanted = np.array([self._wanted], np.int32)
        communicator.allreduce(Buffer.from_array(wanted), ReduceOp.MIN)
        return communicator.empty(self._size) if wanted[0] else None
