"""What the primitives of an engine compute, from the arguments of all members at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdtrain.buffer import Buffer
from hvdtrain.types import ReduceOp

_REDUCE: Mapping[ReduceOp, Any] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}


@dataclass(frozen=True, slots=True)
class Call:
    """One member's call of a primitive."""

    primitive: str
    equal: tuple[object, ...] = ()
    own: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.primitive}({', '.join(map(str, self.equal))})"


@dataclass(slots=True)
class Carried:
    """The elements of an allreduce beside a vote, and whether they were reduced."""

    source: Buffer
    target: Buffer
    equal: tuple[ReduceOp, float]
    prescale: float
    done: bool = False


def _max(calls: Sequence[Call]) -> None:
    values = [call.own[0] for call in calls]
    alike = all(np.array_equal(own[-2:], values[0][-2:]) for own in values)
    highest = np.maximum.reduce(values)
    for own in values:
        own[:] = highest
    if alike and all(len(call.own) == 2 for call in calls):
        for carried in zip(*(call.own[1] for call in calls), strict=True):
            _reduce_carried(carried)


def _reduce_carried(carried: Sequence[Carried]) -> None:
    for one in carried:
        one.target.copy_from(one.source)
        one.done = True
    _allreduce([Call("allreduce", c.equal, (c.target, c.prescale)) for c in carried])


def _reduced(calls: Sequence[Call], op: ReduceOp) -> npt.NDArray[np.generic]:
    scaled = []
    for call in calls:
        buffer, prescale = call.own[0], call.own[1]
        copy = Buffer.from_array(buffer.array().copy(), buffer.dtype)
        copy.scale(prescale)
        scaled.append(copy.array())
    result: npt.NDArray[np.generic] = _REDUCE[op].reduce(scaled)
    return result


def _allreduce(calls: Sequence[Call]) -> None:
    op, postscale = calls[0].equal[:2]
    assert isinstance(op, ReduceOp)
    result = _reduced(calls, op)
    for call in calls:
        call.own[0].array()[:] = result
        call.own[0].scale(postscale)


def _reduce_scatter(calls: Sequence[Call]) -> None:
    op, postscale, counts = calls[0].equal[:3]
    assert isinstance(op, ReduceOp)
    assert isinstance(counts, tuple)
    result = _reduced(calls, op)
    for call, count, end in zip(calls, counts, accumulate(counts), strict=True):
        receive = call.own[2]
        receive.array()[:] = result[end - count : end]
        receive.scale(postscale)


def _broadcast(calls: Sequence[Call]) -> None:
    root = calls[0].equal[0]
    assert isinstance(root, int)
    content = calls[root].own[0].array().copy()
    for call in calls:
        call.own[0].array()[:] = content


def _allgather(calls: Sequence[Call]) -> None:
    content = np.concatenate([call.own[0].array() for call in calls])
    for call in calls:
        call.own[1].array()[:] = content


def _alltoall(calls: Sequence[Call]) -> None:
    parts = []
    for call in calls:
        send, _, send_counts, _ = call.own
        parts.append(np.split(send.array().copy(), list(accumulate(send_counts))[:-1]))
    for rank, call in enumerate(calls):
        _, receive, _, receive_counts = call.own
        received = [theirs[rank] for theirs in parts]
        if [part.size for part in received] != list(receive_counts):
            raise ValueError(
                f"rank {rank} expects parts of {list(receive_counts)} elements in alltoall, and "
                f"was sent {[part.size for part in received]}"
            )
        receive.array()[:] = np.concatenate(received)


def _nothing(calls: Sequence[Call]) -> None:
    pass


COMBINE: Mapping[str, Callable[[Sequence[Call]], None]] = {
    "start_max": _max,
    "allreduce": _allreduce,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "allgather": _allgather,
    "alltoall": _alltoall,
    "barrier": _nothing,
    "split": _nothing,
    "empty": _nothing,
}
