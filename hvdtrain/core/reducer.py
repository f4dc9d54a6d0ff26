"""Reduces the buckets of a plan, in plan order, beside the thread that fills them.

A step of the plan is one agreed operation; its buckets then travel unannounced on a
communicator of the plan's own, so nothing else can come between them.
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.core import context
from hvdtrain.core.channel import Channel, Request
from hvdtrain.core.objects import allgather_object, broadcast_object
from hvdtrain.core.plan import ParameterSpec, Plan, first_difference, make_plan
from hvdtrain.core.stopwatch import Stopwatch
from hvdtrain.errors import MismatchError, UnsupportedError
from hvdtrain.types import ReduceOp

__all__ = ["GradientReducer", "agree_on_plan"]


def agree_on_plan(specs: list[ParameterSpec]) -> Plan:
    """Make rank 0's plan on every rank (collective).

    Raises:
        MismatchError: the parameters of a rank differ from rank 0's; the first is named.
    """
    config = context.current().config
    plan: Plan = broadcast_object(
        make_plan(specs, config.bucket_bytes, config.first_bucket_bytes), name="bucket plan"
    )
    differences = allgather_object(first_difference(specs, plan.specs), name="bucket plan")
    for rank, difference in enumerate(differences):
        if difference is not None:
            raise MismatchError(
                f"[rank {rank}/{len(differences)}] DistributedOptimizer: {difference}. Build "
                "the same model on every rank"
            )
    return plan


class GradientReducer:
    """Sums or averages the buckets of one plan over all ranks.

    One thread fills `buffers` and calls the methods; with an engine that allows it, a thread
    of the reducer's own moves the bytes meanwhile.

    Args:
        channel: of the plan's own.
        plan: equal on all ranks.
        op: AVERAGE (weighted by `sample_weight`) or SUM.
        blocked: counts how long the calling thread waits.

    Attributes:
        buffers: for each bucket its memory.
        sample_weight: what this rank counts in the average of the next step, c_r in
            g = sum_r(c_r g_r) / sum_r(c_r).
    """

    def __init__(self, channel: Channel, plan: Plan, op: ReduceOp, blocked: Stopwatch) -> None:
        communicator = channel.communicator
        self.sample_weight = 1.0
        self.buffers = [
            Buffer.from_array(communicator.empty(b.count * b.dtype.itemsize).view(b.dtype.numpy),
                              b.dtype)
            for b in plan.buckets
        ]  # fmt: skip
        for buffer in self.buffers:
            objection = communicator.capabilities.objection(buffer, ReduceOp.SUM)
            if objection is not None:
                raise UnsupportedError(f"gradients: the engine does not take {objection}")
        self._channel = channel
        self._op = op
        self._blocked = blocked
        self._request = Request("optimizer step", details=(("plan", plan.digest),))
        self._prescale, self._postscale = 1.0, 1.0
        self._launched: list[Future[None]] = []
        self._tasks: queue.SimpleQueue[tuple[int, Future[None]] | None] = queue.SimpleQueue()
        self._has_thread = communicator.capabilities.concurrent
        if self._has_thread:
            threading.Thread(target=self._serve, name="hvdtrain-reducer", daemon=True).start()

    @property
    def launched(self) -> int:
        """How many buckets of this step are on their way or done."""
        return len(self._launched)

    @property
    def complete(self) -> bool:
        """Whether all buckets of this step are on their way or done."""
        return len(self._launched) == len(self.buffers)

    def launch(self) -> None:
        """Reduce the next bucket of the plan, whose memory is filled."""
        future: Future[None] = Future()
        self._launched.append(future)
        task = (len(self._launched) - 1, future)
        if self._has_thread:
            self._tasks.put(task)
        else:
            self._run(task)

    def wait(self) -> None:
        """Block until all launched buckets are reduced; raise what went wrong."""
        with self._blocked.running():
            for future in self._launched:
                future.result()

    def finish(self, used: list[bool]) -> list[bool]:
        """End a complete step; return which parameters any rank used (collective).

        Args:
            used: for each parameter whether this rank contributed a gradient.
        """
        self.wait()
        flags = np.array(used, np.uint8)
        with self._blocked.running():
            # The step was agreed on, and every bucket of it is done on all ranks or under way.
            self._channel.communicator.allreduce(Buffer.from_array(flags), ReduceOp.MAX)
        self._launched = []
        return [bool(flag) for flag in flags]

    def close(self) -> None:
        """Stop the thread (local)."""
        self._tasks.put(None)

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._run(task)

    def _run(self, task: tuple[int, Future[None]]) -> None:
        index, future = task
        try:
            if index == 0:
                self._begin()
            elif (error := self._launched[index - 1].exception()) is not None:
                raise error
            self._channel.communicator.allreduce(
                self.buffers[index], ReduceOp.SUM, self._prescale, self._postscale
            )
            if index == len(self.buffers) - 1:
                self._channel.unfinished = ""
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    def _begin(self) -> None:
        weights = np.array([self.sample_weight])
        with self._channel.agreed(self._request) as communicator:
            communicator.allreduce(Buffer.from_array(weights), ReduceOp.SUM)
            self._channel.unfinished = "an optimizer step"
        if self._op is ReduceOp.SUM:
            return
        total = float(weights[0])
        if total <= 0.0:
            raise ValueError("no rank has samples: the sample weights of all ranks are zero")
        # Equal weights give the factor 1, and then the sum divided by the number of ranks.
        self._prescale = self.sample_weight * communicator.size / total
        self._postscale = 1.0 / communicator.size
