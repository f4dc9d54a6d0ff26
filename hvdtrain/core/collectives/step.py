"""One step of a bucket plan: a single agreed operation, whose buckets then travel unannounced."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.core.collectives.adasum import adasum
from hvdtrain.core.operation import Operation
from hvdtrain.core.request import Request, Zeros
from hvdtrain.core.timeline.times import BucketTimes
from hvdtrain.engines.communicator import Communicator
from hvdtrain.types import DType, ReduceOp

__all__ = ["STEP", "Step", "StepState", "step_request"]

STEP = "optimizer step"


def step_request(
    digest: str, buffers: Sequence[Buffer], numbers: int, op: ReduceOp, postscale: float = 1.0
) -> Request:
    """Return what ranks agree on before a step of the plan with this digest.

    Args:
        digest: of the plan.
        buffers: for each bucket its memory.
        numbers: how many are added up at the end.
        op: AVERAGE, SUM or ADASUM.
        postscale: factor after the reduction.
    """
    kinds = (*((buffer.count, buffer.dtype) for buffer in buffers), (numbers, DType.INT32))
    details = (("op", op.value), ("postscale", repr(float(postscale))))
    return Request(STEP, f"plan {digest}", details, Zeros(kinds, op, postscale=postscale))


class StepState:
    """What the thread that fills buckets and the one that reduces them share.

    Args:
        buffers: for each bucket its memory.
        numbers: 32-bit integers that are added up at the end, in place.
        op: AVERAGE, SUM or ADASUM.
        weight: what this rank counts in the average; None for 1, with the plain average over
            all ranks, joined ones included, as long as no rank gives a weight.
        prescale: factor before the reduction.
        postscale: factor after it.
        joined: this rank has no data any more; it neither weighs nor gives a weight.
    """

    def __init__(
        self,
        buffers: Sequence[Buffer],
        numbers: Buffer,
        op: ReduceOp,
        weight: float | None,
        prescale: float = 1.0,
        postscale: float = 1.0,
        joined: bool = False,
    ) -> None:
        self.joined = joined
        self.buffers, self.numbers = buffers, numbers
        self.op, self.weight = op, weight
        self.prescale, self.postscale = prescale, postscale
        self.done: list[Future[None]] = [Future() for _ in buffers]
        self.added: Future[None] = Future()
        self.filled: list[float] = []
        self._news = threading.Condition()
        self._launched = 0

    @property
    def launched(self) -> int:
        """How many buckets are filled."""
        return self._launched

    @property
    def complete(self) -> bool:
        """Whether all buckets are filled."""
        return self._launched == len(self.buffers)

    def launch(self) -> None:
        """Say that the next bucket is filled."""
        with self._news:
            self._launched += 1
            self.filled.append(time.perf_counter())
            self._news.notify()

    def launch_all(self) -> None:
        """Say that all buckets are filled."""
        with self._news:
            self.filled += [time.perf_counter()] * (len(self.buffers) - self._launched)
            self._launched = len(self.buffers)
            self._news.notify()

    def wait_for_bucket(self, number: int) -> Buffer:
        """Return a bucket's memory when it is filled."""
        with self._news:
            self._news.wait_for(lambda: self._launched > number)
        return self.buffers[number]


class Step(Operation):
    """Reduce the buckets of a step in the order of its plan, each as soon as it is filled.

    The average is g = sum_r(c_r g_r) / sum_r(c_r) with the ranks' weights c_r.
    """

    def __init__(self, state: StepState, request: Request) -> None:
        super().__init__()
        self.request = request
        self._state, self._buffers = state, state.buffers
        self._moves: list[tuple[float, float, float]] = []

    def buckets(self) -> list[BucketTimes]:
        pairs = zip(self._state.buffers, self._state.filled, self._moves, strict=False)
        return [
            BucketTimes(number, buffer.nbytes, free, filled, began, ended)
            for number, (buffer, filled, (free, began, ended)) in enumerate(pairs)
        ]

    def awaited_since(self) -> float | None:
        filled = self._state.filled
        return filled[-1] if len(filled) == len(self._buffers) else None

    def abandon(self) -> None:
        # Peers may be blocked in any bucket: let them through, with zeros.
        for buffer in self._buffers[self._state.launched :]:
            buffer.array()[:] = 0
        self._state.launch_all()

    def execute(self, communicator: Communicator) -> None:
        state = self._state
        prescale, postscale = self._factors(communicator)
        for number, future in enumerate(state.done):
            free = time.perf_counter()
            buffer = state.wait_for_bucket(number)
            began = time.perf_counter()
            if state.op is ReduceOp.ADASUM:
                adasum(communicator, buffer, prescale, postscale)
            else:
                communicator.allreduce(buffer, ReduceOp.SUM, prescale, postscale)
            self._moves.append((free, began, time.perf_counter()))
            future.set_result(None)
        communicator.allreduce(state.numbers, ReduceOp.SUM)

    def end(self, result: Any, error: BaseException | None) -> None:
        super().end(result, error)
        # Not before: whoever waits for these may submit the next step at once.
        if error is None:
            self._state.added.set_result(None)
        else:
            self._refuse(error)

    def _refuse(self, error: BaseException) -> None:
        """Hand an error to whoever waits for a bucket."""
        for future in (*self._state.done, self._state.added):
            if not future.done():
                future.set_exception(error)

    def _factors(self, communicator: Communicator) -> tuple[float, float]:
        state = self._state
        weight = 1.0 if state.weight is None else state.weight
        if state.joined:
            weight = 0.0
        weights = np.array([weight, float(state.weight is not None)])
        communicator.allreduce(Buffer.from_array(weights), ReduceOp.SUM)
        if state.op is not ReduceOp.AVERAGE:
            return state.prescale, state.postscale
        postscale = state.postscale / communicator.size
        total, weighted = weights.tolist()
        if not weighted:
            return state.prescale, postscale
        if total <= 0.0:
            raise ValueError("no rank has samples: the sample weights of all ranks are zero")
        # Equal weights give the factor 1, and then the sum divided by the number of ranks.
        return state.prescale * weight * communicator.size / total, postscale
