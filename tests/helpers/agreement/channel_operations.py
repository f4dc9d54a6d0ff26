"""The operations of random programs: how a rank makes them, and of which data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from channel_program import BARRIER, OTHER, Planned

from hvdtrain.buffer import Buffer
from hvdtrain.core.agreement.operation import Operation, Request, Work
from hvdtrain.core.collectives.allreduce import Allreduce, AllreducePlan, PlannedAllreduce
from hvdtrain.core.collectives.gathers import allgather, allocate, broadcast, split
from hvdtrain.core.exchanges import allreduce
from hvdtrain.core.gradients.reducer import step_request
from hvdtrain.core.gradients.step import GradientStep
from hvdtrain.core.gradients.step_info import OwnStep

Array = npt.NDArray[np.generic]
Value = list[list[float]]


@dataclass
class Made:
    operation: Operation
    read: Callable[[Any], Value]
    step: GradientStep | None = None
    repeat: Callable[[], Operation] | None = None  # makes it as a later call by a plan does


def data(planned: Planned, rank: int, part: int, count: int) -> Array:
    places = np.arange(count) * 3 + planned.number * 7 + rank * 11 + part * 5
    return ((places % 17) - 8).astype(planned.dtype.numpy)


def make(planned: Planned, rank: int, size: int, name: Callable[[str, str], str]) -> Made:
    if planned.variants.get(rank) == BARRIER:
        return Made(Work(Request("barrier", name("barrier", planned.name))), lambda _: [])
    return _MAKERS[planned.kind](planned, rank, size, name(planned.kind, planned.name))


def _longer(planned: Planned, rank: int) -> int:
    return int(planned.variants.get(rank) == OTHER)


def _arrays(planned: Planned, rank: int) -> list[Array]:
    more = _longer(planned, rank)
    return [data(planned, rank, part, count + more) for part, count in enumerate(planned.counts)]


def _allreduce(planned: Planned, rank: int, size: int, name: str) -> Made:
    arrays = _arrays(planned, rank)
    buffers = [Buffer.from_array(array) for array in arrays]
    shapes = [array.shape for array in arrays]
    operation = Allreduce(buffers, shapes, planned.op, name, planned.prescale)

    def repeat() -> Operation:
        plan = AllreducePlan(buffers, shapes, planned.op, name, planned.prescale, 1.0)
        sources = arrays if rank % 2 else [array.copy() for array in arrays]
        return PlannedAllreduce(plan, name, sources, arrays, lambda array: int(array.ctypes.data))

    return Made(operation, lambda _: [array.tolist() for array in arrays], repeat=repeat)


def _broadcast(planned: Planned, rank: int, size: int, name: str) -> Made:
    (array, *_) = _arrays(planned, rank)
    root = planned.number % size
    operation = broadcast(Buffer.from_array(array), array.shape, root, name, root)
    return Made(operation, lambda _: [array.tolist()])


def rows(planned: Planned, rank: int, other: int = 0) -> int:
    return (planned.number + rank + other) % 3


def _allgather(planned: Planned, rank: int, size: int, name: str) -> Made:
    width = planned.counts[0] + _longer(planned, rank)
    own_rows = rows(planned, rank)
    own = Buffer.from_array(data(planned, rank, 0, own_rows * width))
    operation = allgather([own], [(own_rows, width)], name)
    return Made(operation, lambda result: [result[0][0].array().tolist(), result[0][1]])


def _barrier(planned: Planned, rank: int, size: int, name: str) -> Made:
    return Made(Work(Request("barrier", name)), lambda _: [])


def _split(planned: Planned, rank: int, size: int, name: str) -> Made:
    def read(communicator: Any) -> Value:
        if communicator is None:
            return []
        communicator.close()
        return [[communicator.rank, communicator.size]]

    return Made(split(planned.members), read)


def _memory(planned: Planned, rank: int, size: int, name: str) -> Made:
    nbytes = 64 * (planned.counts[0] + _longer(planned, rank))
    return Made(allocate(nbytes, name), lambda memory: [[memory.size]])


def _step(planned: Planned, rank: int, size: int, name: str) -> Made:
    arrays = [
        data(planned, rank, part, count).astype(np.float64)
        for part, count in enumerate(planned.counts)
    ]
    buffers = [Buffer.from_array(array) for array in arrays]
    numbers = np.array([planned.number, rank + 1], np.int32)
    exchange = allreduce.AllreduceExchange(
        planned.op, predivide=2.0 if _longer(planned, rank) else 1.0
    )
    step = GradientStep(buffers, Buffer.from_array(numbers), exchange)
    request = step_request(name, "digest", buffers, numbers.size, exchange)
    step.submitted_with(request, OwnStep(planned.weights.get(rank)))
    return Made(step, lambda _: [*(a.tolist() for a in arrays), numbers.tolist()], step)


_MAKERS: Mapping[str, Callable[[Planned, int, int, str], Made]] = {
    "allreduce": _allreduce, "broadcast": _broadcast, "allgather": _allgather, "barrier": _barrier,
    "split": _split, "memory": _memory, "step": _step,
}  # fmt: skip
