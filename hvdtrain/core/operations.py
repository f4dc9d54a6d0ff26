"""Free-standing operations on buffers: agreed first, then moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from hvdtrain.buffer import Buffer
from hvdtrain.core import context
from hvdtrain.core.channel import Channel, Request
from hvdtrain.errors import UnsupportedError
from hvdtrain.types import ReduceOp

__all__ = ["allgather", "allreduce", "barrier", "broadcast"]


def allreduce(
    buffer: Buffer,
    shape: Sequence[int],
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> None:
    """Reduce a buffer of every rank in place (collective, blocking).

    AVERAGE is postscale * sum_r(prescale * buffer_r) / size; for integers the quotient is
    truncated towards zero.

    Args:
        buffer: the elements; overwritten with the result.
        shape: the tensor's shape, which must be equal on all ranks.
        op: the reduction.
        name: shown in messages; must be equal on all ranks.
        prescale: factor before the reduction.
        postscale: factor after it.

    Raises:
        MismatchError: name, shape, type, op or factors differ between ranks.
        UnsupportedError: the engine does not reduce this type.
    """
    world = _world()
    engine_op = ReduceOp.SUM if op is ReduceOp.AVERAGE else op
    _check(world, buffer, "allreduce", name, engine_op)
    request = Request(
        "allreduce",
        name or "",
        (
            ("op", op.value),
            ("shape", str(tuple(shape))),
            ("dtype", buffer.dtype.value),
            ("prescale", repr(prescale)),
            ("postscale", repr(postscale)),
        ),
    )
    average = op is ReduceOp.AVERAGE
    divides = average and buffer.dtype.is_integer
    factor = postscale / world.communicator.size if average and not divides else postscale
    with context.current().blocked.running(), world.agreed(request) as communicator:
        communicator.allreduce(buffer, engine_op, prescale, factor)
        if divides:
            _divide(buffer, communicator.size)


def broadcast(
    buffer: Buffer, shape: Sequence[int], root_rank: int, name: str | None = None
) -> None:
    """Overwrite every rank's buffer with that of `root_rank` (collective, blocking).

    Raises:
        ValueError: there is no such rank.
        MismatchError: name, shape, type or root_rank differ between ranks.
    """
    world = _world()
    if not 0 <= root_rank < world.communicator.size:
        raise ValueError(f"root_rank {root_rank} is not in a world of {world.communicator.size}")
    _check(world, buffer, "broadcast", name)
    request = Request(
        "broadcast",
        name or "",
        (
            ("root_rank", str(root_rank)),
            ("shape", str(tuple(shape))),
            ("dtype", buffer.dtype.value),
        ),
    )
    with context.current().blocked.running(), world.agreed(request) as communicator:
        communicator.broadcast(buffer, root_rank)


def allgather(
    buffer: Buffer, shape: Sequence[int], name: str | None = None
) -> tuple[Buffer, list[int]]:
    """Concatenate the buffers of all ranks along the first dimension (collective, blocking).

    Args:
        buffer: this rank's elements.
        shape: its shape, at least 1-d; only the first dimension may differ between ranks.
        name: shown in messages; must be equal on all ranks.

    Returns:
        The elements of all ranks in rank order (new memory), and each rank's first dimension.

    Raises:
        MismatchError: name, type or the other dimensions differ between ranks.
    """
    world = _world()
    _check(world, buffer, "allgather", name)
    request = Request(
        "allgather",
        name or "",
        (("shape beyond the first", str(tuple(shape[1:]))), ("dtype", buffer.dtype.value)),
    )
    with context.current().blocked.running(), world.agreed(request) as communicator:
        size = communicator.size
        rows = np.empty(size, np.int64)
        own = np.array([shape[0]], np.int64)
        communicator.allgather(Buffer.from_array(own), Buffer.from_array(rows), [1] * size)
        width = int(np.prod(shape[1:], dtype=np.int64))
        gathered = np.empty(int(rows.sum()) * width, buffer.dtype.numpy)
        receive = Buffer.from_array(gathered, buffer.dtype)
        communicator.allgather(buffer, receive, (rows * width).tolist())
    return receive, rows.tolist()


def barrier() -> None:
    """Return when every rank has called it (collective)."""
    with context.current().blocked.running(), _world().agreed(Request("barrier")):
        pass


def _world() -> Channel:
    return context.current().world


def _check(
    channel: Channel, buffer: Buffer, operation: str, name: str | None, op: ReduceOp | None = None
) -> None:
    communicator = channel.communicator
    objection = communicator.capabilities.objection(buffer, op)
    if objection is not None:
        engine = context.current().engine_name
        raise UnsupportedError(
            f"[rank {communicator.rank}/{communicator.size}] {operation} {name or ''}: engine "
            f"{engine} does not take {objection}"
        )


def _divide(buffer: Buffer, divisor: int) -> None:
    array = cast("npt.NDArray[np.integer[Any]]", buffer.array())
    rounded_up = (array < 0) & (array % divisor != 0)  # // rounds down
    array //= divisor
    array[rounded_up] += 1
