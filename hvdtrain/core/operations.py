"""Named operations: their arguments checked and interpreted, and submitted to a channel."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core import context, gathers
from hvdtrain.core.agreement.channel import Channel, Submission
from hvdtrain.core.agreement.lifecycle import JoinOrder, last_to_join
from hvdtrain.core.agreement.operation import Request, Work
from hvdtrain.errors import UnsupportedError
from hvdtrain.types import DType, ReduceOp

if TYPE_CHECKING:
    from hvdtrain.core.allreduce import AllreduceTemplate

_ADASUM_TYPES = (DType.FLOAT32, DType.FLOAT64)

# The reductions of an engine that differ from the user's; Adasum is made of other operations.
_ENGINE_OPS = {ReduceOp.AVERAGE: ReduceOp.SUM, ReduceOp.ADASUM: None}


def make_template(
    channel: Channel,
    buffers: Sequence[Buffer],
    shapes: Sequence[Sequence[int]],
    op: ReduceOp,
    name: str,
    prescale: float = 1.0,
    postscale: float = 1.0,
    kinds: Sequence[str] | None = None,
) -> AllreduceTemplate:
    """Check a reduction, of which the addresses are not used, and make its template."""
    from hvdtrain.core.allreduce import AllreduceTemplate

    _check(channel, f"allreduce {name!r}", buffers, op)
    return AllreduceTemplate(buffers, shapes, op, name, prescale, postscale, kinds)


def allreduce(
    channel: Channel,
    buffers: Sequence[Buffer],
    shapes: Sequence[Sequence[int]],
    op: ReduceOp,
    name: str | None = None,
) -> Submission:
    """Prepare a reduction of buffers in place."""
    from hvdtrain.core.allreduce import TemplateAllreduce

    name = channel.name("allreduce", name)
    template = make_template(channel, buffers, shapes, op, name)
    return Submission(channel, TemplateAllreduce(template, name, buffers, buffers))


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
    _check(channel, f"broadcast {name!r}", [buffer])
    root = channel.ranks.index(root_rank)
    return Submission(channel, gathers.broadcast(buffer, shape, root, name, root_rank))


def allgather(
    channel: Channel,
    buffers: Sequence[Buffer],
    shapes: Sequence[Sequence[int]],
    name: str | None = None,
) -> Submission:
    """Prepare a concatenation of all ranks' tensors along the first dimension."""
    name = channel.name("allgather", name)
    _check(channel, f"allgather {name!r}", buffers)
    return Submission(channel, gathers.allgather(buffers, shapes, name))


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
    _check(channel, f"alltoall {name!r}", [buffer])
    return Submission(channel, gathers.alltoall(buffer, shape, splits, name))


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
    _check(channel, f"reducescatter {name!r}", buffers, op)
    operation = gathers.reducescatter(buffers, shapes, op, name, prescale, postscale, kinds)
    return Submission(channel, operation)


@collective
def barrier(channel: Channel) -> None:
    channel.run(Work(Request("barrier", channel.name("barrier", None))))


@collective
def join() -> int:
    """Contribute zeros to other ranks' reductions until all ranks have joined."""
    here = context.current()
    everywhere = [c for c in here.channels() if len(c.ranks) == here.topology.size]
    waits = [Submission(channel, channel.join()) for channel in everywhere]
    orders: list[JoinOrder] = [wait.wait() for wait in waits]
    return last_to_join(orders)


def _check(
    channel: Channel, what: str, buffers: Sequence[Buffer], op: ReduceOp | None = None
) -> None:
    engine_op = None if op is None else _ENGINE_OPS.get(op, op)
    for buffer in buffers:
        objection = channel.communicator.capabilities.unsupported(buffer, engine_op)
        if objection is None and op is ReduceOp.ADASUM and buffer.dtype not in _ADASUM_TYPES:
            objection = f"adasum of {buffer.dtype.value}"
        if objection is not None:
            here = context.current()
            raise UnsupportedError(
                f"{here.topology.title} {what}: engine {here.engine_name} does not take {objection}"
            )


# bool is reduced as 0 and 1: any rank, or every rank.
_BOOL_OPS = {
    ReduceOp.SUM: ReduceOp.MAX,
    ReduceOp.MAX: ReduceOp.MAX,
    ReduceOp.AVERAGE: ReduceOp.MIN,
    ReduceOp.MIN: ReduceOp.MIN,
    ReduceOp.PRODUCT: ReduceOp.MIN,
}


def choose_op(op: ReduceOp | None, average: bool | None) -> ReduceOp:
    """Return the reduction from the argument `op` or its deprecated predecessor `average`."""
    if op is not None and average is not None:
        raise ValueError("op and average mean the same: pass only op")
    if average is not None:
        warnings.warn("average is deprecated: use op=Average or op=Sum", DeprecationWarning, 3)
        return ReduceOp.AVERAGE if average else ReduceOp.SUM
    if op is not None and not isinstance(op, ReduceOp):
        raise ValueError(f"op must be Average, Sum, Min, Max, Product or Adasum, got {op!r}")
    return op or ReduceOp.AVERAGE


def check_has_gradient(operation: str, op: ReduceOp) -> None:
    """Refuse the gradient of a reduction that is not linear."""
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise ValueError(f"{operation} with op={op.value} has no gradient: use Average or Sum")


def op_on_wire(
    kinds: list[str], op: ReduceOp, prescale_factor: float, postscale_factor: float
) -> tuple[ReduceOp, list[str]]:
    """Return the reduction for the engine, and the types on which ranks must agree.

    bool is reduced as 0 and 1, for which the engine uses the same reduction for several `op`.
    """
    if not kinds:
        raise ValueError("a group needs at least one tensor")
    if "bool" not in kinds:
        return op, kinds
    if any(kind != "bool" for kind in kinds):
        raise ValueError("a group cannot contain both bool and other tensors")
    if (prescale_factor, postscale_factor) != (1.0, 1.0):
        raise ValueError("a factor cannot be applied to bool")
    if op not in _BOOL_OPS:
        raise ValueError(f"{op.value} is not defined for bool")
    return _BOOL_OPS[op], [f"bool ({op.value})"] * len(kinds)
