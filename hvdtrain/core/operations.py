"""Named operations: checked, named, and submitted to a channel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core import context
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.agreement.decision import JoinOrder, last_to_join
from hvdtrain.core.agreement.operation import Operation
from hvdtrain.core.agreement.votes import Prepared
from hvdtrain.core.collectives.allreduce import Allreduce
from hvdtrain.core.collectives.gathers import Allgather, Alltoall, Barrier, Broadcast, ReduceScatter
from hvdtrain.errors import UnsupportedError
from hvdtrain.streams import Streams
from hvdtrain.types import DType, ReduceOp

_ADASUM_TYPES = (DType.FLOAT32, DType.FLOAT64)

# The reductions of an engine that differ from the user's; Adasum is made of other operations.
_ENGINE_OPS = {ReduceOp.AVERAGE: ReduceOp.SUM, ReduceOp.ADASUM: None}


@dataclass(slots=True)
class Submission:
    """An operation that is prepared for a channel, and may have been submitted."""

    channel: Channel
    operation: Operation

    def after(self, streams: Streams) -> Submission:
        """Order it after the work on the current stream of a device."""
        self.operation.streams, self.operation.mark = streams, streams.mark()
        return self

    @collective
    def start(self) -> Submission:
        """Submit the operation (in any order)."""
        self.channel.submit(self.operation)
        return self

    def done(self) -> bool:
        """Return whether the operation is complete, including its work on a device."""
        operation = self.operation
        return self.channel.poll(operation) and operation.streams.done(operation.finished)

    def wait(self) -> Any:
        """Wait for the result or the error, even after shutdown(); on a device, its stream does."""
        operation = self.operation
        if not operation.done:
            with context.current().blocked.running():
                self.channel.wait(operation)
        operation.streams.wait(operation.finished)
        return operation.outcome()

    @collective
    def run(self) -> Any:
        operation = self.operation
        with context.current().blocked.running():
            result = self.channel.run(operation)
        operation.streams.wait(operation.finished)
        return result


@collective
def run_prepared(channel: Channel, prepared: Prepared, data: object) -> bool:
    """Run a prepared operation if nothing else is pending, and no timeline is recorded."""
    if channel.queue.timed:
        return False
    with context.current().blocked.running():
        return channel.run_prepared(prepared, data)


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
    """Prepare a reduction of buffers, in place or from `sources`."""
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
    """Prepare a broadcast into the buffer of every rank."""
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
    """Prepare a concatenation of all ranks' tensors along the first dimension."""
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
    """Prepare an exchange of rows between all ranks."""
    name = channel.name("alltoall", name)
    size = channel.communicator.size
    if not shape:
        raise ValueError(f"alltoall {name!r}: a scalar has no first dimension to split")
    if splits is None:
        if shape[0] % size:
            raise ValueError(
                f"alltoall {name!r}: first dimension {shape[0]} is not divisible by {size} "
                "ranks: pass splits"
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
    """Prepare a reduction whose result is divided among the ranks by rows."""
    name = channel.name("reducescatter", name)
    if op is ReduceOp.ADASUM:
        raise UnsupportedError(f"reducescatter {name!r}: Adasum is not available here")
    if not all(shapes):
        raise ValueError(f"reducescatter {name!r}: a scalar has no first dimension to split")
    for buffer in buffers:
        _check(channel, buffer, f"reducescatter {name!r}", op)
    operation = ReduceScatter(buffers, shapes, op, name, prescale, postscale, kinds)
    return Submission(channel, operation)


@collective
def barrier(channel: Channel) -> None:
    Submission(channel, Barrier(channel.name("barrier", None))).run()


@collective
def join() -> int:
    """Contribute zeros to other ranks' reductions until all ranks have joined."""
    here = context.current()
    everywhere = [c for c in here.channels() if len(c.ranks) == here.topology.size]
    waits = [Submission(channel, channel.join()) for channel in everywhere]
    orders: list[JoinOrder] = [wait.wait() for wait in waits]
    return last_to_join(orders)


def _check(channel: Channel, buffer: Buffer, what: str, op: ReduceOp | None = None) -> None:
    engine_op = None if op is None else _ENGINE_OPS.get(op, op)
    objection = channel.communicator.capabilities.unsupported(buffer, engine_op)
    if objection is None and op is ReduceOp.ADASUM and buffer.dtype not in _ADASUM_TYPES:
        objection = f"adasum of {buffer.dtype.value}"
    if objection is not None:
        here = context.current()
        raise UnsupportedError(
            f"{here.topology.title} {what}: engine {here.engine_name} does not take {objection}"
        )
