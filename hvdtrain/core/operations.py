"""Free-standing operations: checked, named, and handed to a channel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.buffer import Buffer
from hvdtrain.core import context
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.agreement.operation import Operation
from hvdtrain.core.collectives.allreduce import Allreduce
from hvdtrain.core.collectives.gathers import Allgather, Alltoall, Barrier, Broadcast
from hvdtrain.core.collectives.reducescatter import ReduceScatter
from hvdtrain.errors import UnsupportedError
from hvdtrain.streams import Streams
from hvdtrain.types import DType, ReduceOp

__all__ = [
    "Submission",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "join",
    "reducescatter",
]

_ADASUM_TYPES = (DType.FLOAT32, DType.FLOAT64)

# What an engine is to do for these reductions; Adasum is put together from other operations.
_ENGINE_OPS = {ReduceOp.AVERAGE: ReduceOp.SUM, ReduceOp.ADASUM: None}


@dataclass(slots=True)
class Submission:
    """An operation that is prepared for a channel, and perhaps under way."""

    channel: Channel
    operation: Operation

    def after(self, streams: Streams) -> Submission:
        """Order it after what the calling thread has put on a device's current stream (local)."""
        self.operation.streams, self.operation.mark = streams, streams.mark()
        return self

    def start(self) -> Submission:
        """Queue it (collective, in any order)."""
        self.channel.submit(self.operation)
        return self

    def done(self) -> bool:
        """Return whether it is complete, on the device too (local)."""
        operation = self.operation
        return self.channel.poll(operation) and operation.streams.done(operation.finished)

    def wait(self) -> Any:
        """Block until it is complete; return or raise how it ended, also after shutdown().

        On a device, the calling thread's current stream is made to wait instead.
        """
        operation = self.operation
        if not operation.done:
            with context.current().blocked.running():
                self.channel.wait(operation)
        operation.streams.wait(operation.finished)
        return operation.outcome()

    def run(self) -> Any:
        """Queue it and wait for it."""
        operation = self.operation
        with context.current().blocked.running():
            result = self.channel.run(operation)
        operation.streams.wait(operation.finished)
        return result


def allreduce(
    channel: Channel,
    buffers: Sequence[Buffer],
    shapes: Sequence[Sequence[int]],
    op: ReduceOp,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    kinds: Sequence[str] | None = None,
    sources: Sequence[Buffer] | None = None,
) -> Submission:
    """Prepare a reduction of buffers, in place or from `sources`; see `Allreduce`.

    Raises:
        UnsupportedError: the engine does not reduce this type.
    """
    name = channel.name("allreduce", name)
    for buffer in buffers:
        _check(channel, buffer, f"allreduce {name!r}", op)
    operation = Allreduce(buffers, shapes, op, name, prescale, postscale, kinds, sources)
    return Submission(channel, operation)


def broadcast(
    channel: Channel,
    buffer: Buffer,
    shape: Sequence[int],
    root_rank: int,
    name: str | None = None,
) -> Submission:
    """Prepare a broadcast into every member's buffer; `root_rank` is a rank of the world.

    Raises:
        ValueError: there is no such rank among the members.
    """
    name = channel.name("broadcast", name)
    if root_rank not in channel.ranks:
        raise ValueError(
            f"broadcast {name!r}: root_rank {root_rank} is not one of ranks {channel.ranks}"
        )
    _check(channel, buffer, f"broadcast {name!r}")
    root = channel.ranks.index(root_rank)
    return Submission(channel, Broadcast(buffer, shape, root, name, root_rank))


def allgather(
    channel: Channel,
    buffers: Sequence[Buffer],
    shapes: Sequence[Sequence[int]],
    name: str | None = None,
) -> Submission:
    """Prepare a concatenation along the first dimension; see `Allgather`."""
    name = channel.name("allgather", name)
    for buffer in buffers:
        _check(channel, buffer, f"allgather {name!r}")
    return Submission(channel, Allgather(buffers, shapes, name))


def alltoall(
    channel: Channel,
    buffer: Buffer,
    shape: Sequence[int],
    splits: Sequence[int] | None = None,
    name: str | None = None,
) -> Submission:
    """Prepare an exchange of rows; see `Alltoall`.

    Args:
        channel: where.
        buffer: the elements.
        shape: at least 1-d.
        splits: rows for each member; None for equal parts.
        name: equal on all members.

    Raises:
        ValueError: the splits do not fit the members or the first dimension.
    """
    name = channel.name("alltoall", name)
    size = channel.communicator.size
    if not shape:
        raise ValueError(f"alltoall {name!r}: a scalar has no first dimension to split")
    if splits is None:
        if shape[0] % size:
            raise ValueError(
                f"alltoall {name!r}: first dimension {shape[0]} does not divide by {size} ranks: "
                "pass splits"
            )
        splits = [shape[0] // size] * size
    if len(splits) != size or min(splits) < 0 or sum(splits) != shape[0]:
        raise ValueError(
            f"alltoall {name!r}: splits must be {size} counts that sum to {shape[0]}, got "
            f"{list(splits)}"
        )
    _check(channel, buffer, f"alltoall {name!r}")
    return Submission(channel, Alltoall(buffer, shape, splits, name))


def reducescatter(
    channel: Channel,
    buffers: Sequence[Buffer],
    shapes: Sequence[Sequence[int]],
    op: ReduceOp,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    kinds: Sequence[str] | None = None,
) -> Submission:
    """Prepare a reduction of which every member keeps a part; see `ReduceScatter`.

    Raises:
        ValueError: a scalar.
        UnsupportedError: Adasum, or the engine does not reduce this type.
    """
    name = channel.name("reducescatter", name)
    if op is ReduceOp.ADASUM:
        raise UnsupportedError(f"reducescatter {name!r}: Adasum is not available here")
    if not all(shapes):
        raise ValueError(f"reducescatter {name!r}: a scalar has no first dimension to split")
    for buffer in buffers:
        _check(channel, buffer, f"reducescatter {name!r}", op)
    operation = ReduceScatter(buffers, shapes, op, name, prescale, postscale, kinds)
    return Submission(channel, operation)


def barrier(channel: Channel) -> None:
    """Return when every member has called it (collective)."""
    Submission(channel, Barrier(channel.name("barrier", None))).run()


def join() -> int:
    """Take part in the others' reductions with zeros until all ranks have joined (collective).

    Returns:
        The rank that joined last.
    """
    here = context.current()
    everywhere = [c for c in here.channels() if len(c.ranks) == here.topology.size]
    waits = [Submission(channel, channel.join()) for channel in everywhere]
    results = [wait.wait() for wait in waits]
    last: int = results[-1]
    return last


def _check(channel: Channel, buffer: Buffer, what: str, op: ReduceOp | None = None) -> None:
    engine_op = None if op is None else _ENGINE_OPS.get(op, op)
    objection = channel.communicator.capabilities.objection(buffer, engine_op)
    if objection is None and op is ReduceOp.ADASUM and buffer.dtype not in _ADASUM_TYPES:
        objection = f"adasum of {buffer.dtype.value}"
    if objection is not None:
        here = context.current()
        raise UnsupportedError(
            f"{here.topology.title} {what}: engine {here.engine_name} does not take {objection}"
        )
