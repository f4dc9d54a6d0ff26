"""How long all-reduces of some sizes take."""

from __future__ import annotations

import time

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.core.agreement.operation import Operation
from hvdtrain.core.agreement.request import Request
from hvdtrain.engines.communicator import Communicator
from hvdtrain.types import DType, ReduceOp

__all__ = ["MeasureAllreduce"]

_SIZES_BYTES = (4 << 10, 64 << 10, 1 << 20, 4 << 20)
_CALLS = 10
_BUDGET_SECONDS = 0.05


class MeasureAllreduce(Operation):
    """Time all-reduces in the engine's memory, for at most 50 ms or so.

    The result is, equal on all members, for each size its bytes and the slowest member's seconds;
    a slow network has only the smaller sizes, at least two.
    """

    def __init__(self) -> None:
        super().__init__()
        self.request = Request("measuring all-reduces")

    def execute(self, communicator: Communicator) -> list[tuple[int, float]]:
        # A communicator gives memory back when it is closed, and not before.
        own = communicator.split(range(communicator.size))
        assert own is not None  # every member is in it
        points = _measure(own)
        own.close()
        return points


def _measure(communicator: Communicator) -> list[tuple[int, float]]:
    memory = communicator.empty(_SIZES_BYTES[-1])
    whole = Buffer.of(memory).view(DType.FLOAT32)
    whole.zero()
    points: list[tuple[int, float]] = []
    spent = 0.0
    for nbytes in _SIZES_BYTES:
        if len(points) > 1:
            last_bytes, last_seconds = points[-1]
            if spent + _CALLS * last_seconds * nbytes / last_bytes > _BUDGET_SECONDS:
                break
        part = whole.slice(0, nbytes // whole.dtype.itemsize)
        shortest, together = _time_calls(communicator, part)
        points.append((nbytes, shortest))
        spent += together
    return points


def _time_calls(communicator: Communicator, buffer: Buffer) -> list[float]:
    """Return the seconds of the shortest call and of all, each of the slowest member.

    The shortest, because what other programs do to a call is not in the next one.
    """
    times = []
    for _ in range(_CALLS):
        began = time.perf_counter()
        communicator.allreduce(buffer, ReduceOp.SUM)
        times.append(time.perf_counter() - began)
    slowest = np.array([min(times), sum(times)])
    communicator.allreduce(Buffer.from_array(slowest), ReduceOp.MAX)
    seconds: list[float] = slowest.tolist()
    return seconds
