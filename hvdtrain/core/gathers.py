"""Operations without arithmetic, and reduce-scatter: broadcast, gathers, memory."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from hvdtrain.buffer import Buffer, Elements
from hvdtrain.core.agreement.operation import Request, Work, device_details, device_types
from hvdtrain.engines.communicator import Communicator
from hvdtrain.types import ReduceOp


def rows_of_rank(rows: int, rank: int, size: int) -> int:
    """Return how many rows a rank receives: equally many, and lower ranks one of the remainder."""
    return rows // size + (rank < rows % size)


def reducescatter(
    buffers: Sequence[Buffer],
    shapes: Sequence[Sequence[int]],
    op: ReduceOp,
    name: str,
    prescale: float = 1.0,
    postscale: float = 1.0,
    kinds: Sequence[str] | None = None,
) -> Work:
    """Reduce buffers; return this member's part of the first dimension of each in new memory."""
    from hvdtrain.core.allreduce import divide_truncating, engine_reduction, reduction_details

    def reduce(communicator: Communicator, send: Buffer, shape: Sequence[int]) -> Buffer:
        width, size = prod(shape[1:]), communicator.size
        counts = [rows_of_rank(shape[0], rank, size) * width for rank in range(size)]
        receive = send.like(counts[communicator.rank])
        engine_op, factor, divides = engine_reduction(op, send.dtype, postscale, size)
        communicator.reduce_scatter(send, receive, counts, engine_op, prescale, factor)
        if divides:
            divide_truncating(receive, size)
        return receive

    def execute(communicator: Communicator) -> list[Buffer]:
        pairs = zip(buffers, shapes, strict=True)
        return [reduce(communicator, buffer, shape) for buffer, shape in pairs]

    kinds, devices = kinds or [buffer.dtype.value for buffer in buffers], device_types(buffers)
    details = reduction_details(op, shapes, kinds, prescale, postscale, devices)
    return Work(Request("reducescatter", name, details), execute, buffers)


def _details(
    shape: str, shapes: Sequence[Sequence[int]], buffers: Sequence[Buffer]
) -> tuple[tuple[str, str], ...]:
    """Return what must be equal on all ranks; `shape` says what of the shapes."""
    return (
        (shape, ", ".join(str(tuple(each)) for each in shapes)),
        ("dtype", ", ".join(buffer.dtype.value for buffer in buffers)),
        *device_details(device_types(buffers)),
    )


def split(ranks: Sequence[int]) -> Work:
    """Create a communicator; the result is None on ranks that are not members of it.

    It is an agreed operation because engines use the old communicator to create the new one, and
    the old one may be in use by a round.
    """
    request = Request("opening a channel", details=(("ranks", str(list(ranks))),))
    return Work(request, lambda communicator: communicator.split(ranks))


def broadcast(
    buffer: Buffer, shape: Sequence[int], root_rank: int, name: str, root_shown: int
) -> Work:
    """Overwrite the buffers of all members with the buffer of one."""
    details = ("root_rank", str(root_shown)), *_details("shape", [shape], [buffer])
    request = Request("broadcast", name, details)
    return Work(request, lambda c: c.broadcast(buffer, root_rank), [buffer])


def allgather(buffers: Sequence[Buffer], shapes: Sequence[Sequence[int]], name: str) -> Work:
    """Return new memory with all members' tensors, by rank, and the first dimension of each one."""

    def execute(communicator: Communicator) -> list[tuple[Buffer, list[int]]]:
        own = np.array([shape[0] for shape in shapes], np.int64)
        every = np.empty((communicator.size, own.size), np.int64)
        communicator.allgather(
            Buffer.from_array(own), Buffer.from_array(every), [own.size] * communicator.size
        )
        gathered = []
        for send, shape, rows in zip(buffers, shapes, every.T, strict=True):
            counts = rows * prod(shape[1:])
            receive = send.like(int(counts.sum()))
            communicator.allgather(send, receive, counts.tolist())
            gathered.append((receive, rows.tolist()))
        return gathered

    beyond = [shape[1:] for shape in shapes]
    details = _details("shape beyond the first", beyond, buffers)
    return Work(Request("allgather", name, details), execute, buffers)


def alltoall(buffer: Buffer, shape: Sequence[int], splits: Sequence[int], name: str) -> Work:
    """Send part r of the first dimension to member r; return the received parts and lengths."""
    width = prod(shape[1:])

    def execute(communicator: Communicator) -> tuple[Buffer, list[int]]:
        ones = [1] * communicator.size
        own, incoming = np.array(splits, np.int64), np.empty(communicator.size, np.int64)
        communicator.alltoall(Buffer.from_array(own), Buffer.from_array(incoming), ones, ones)
        receive = buffer.like(int(incoming.sum()) * width)
        communicator.alltoall(buffer, receive, (own * width).tolist(), (incoming * width).tolist())
        return receive, incoming.tolist()

    details = _details("shape beyond the first", [shape[1:]], [buffer])
    return Work(Request("alltoall", name, details), execute, [buffer])


def allocate(nbytes: int, name: str, device: str = "cpu") -> Work:
    """Allocate memory that the communicator reduces fastest; the result is 1-d uint8 memory."""
    kind = device.partition(":")[0]
    request = Request("memory", name, (("bytes", str(nbytes)), *device_details([kind])))
    return Work(request, lambda communicator: communicator.empty(nbytes, device))


def allocate_if(wanted: bool, nbytes: int, name: str) -> Work:
    """Allocate such memory if all members want it; otherwise the result is None."""

    def execute(communicator: Communicator) -> Elements | None:
        every = np.array([wanted], np.int32)
        communicator.allreduce(Buffer.from_array(every), ReduceOp.MIN)
        return communicator.empty(nbytes) if every[0] else None

    return Work(Request("memory if wanted", name, (("bytes", str(nbytes)),)), execute)
