"""Reduces gradients by a plan, beside the thread that fills its buckets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from typing import Protocol

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.gradients.communicators import Communicators
from hvdtrain.core.gradients.exchange import Exchange
from hvdtrain.core.gradients.plan import BucketPlan
from hvdtrain.core.gradients.request import step_request
from hvdtrain.core.gradients.step import GradientStep
from hvdtrain.core.timeline.stopwatch import Stopwatch
from hvdtrain.errors import UnsupportedError
from hvdtrain.streams import HOST, Mark, Streams
from hvdtrain.types import ReduceOp

__all__ = ["Reducer"]

# Ranks are nearly always closer together than this.
_LISTEN_AFTER_SECONDS = 0.02


class World(Protocol):
    """What a reducer needs of the world that its ranks are in."""

    blocked: Stopwatch

    def channels(self) -> Sequence[Channel]:
        """Return all open channels of this rank (local)."""


class Reducer:
    """Reduces gradients by one plan over the ranks of a channel, a step at a time.

    One thread fills `buffers` and calls the methods; with an engine that allows it, the
    channel's thread moves the bytes meanwhile. A step is: `ready` for each gradient that is in its
    bucket, `launch`, `finish`, and `forget` before the next one.

    Args:
        world: what the channel belongs to.
        channel: whose members reduce.
        plan: equal on all ranks.
        buffers: for each bucket its memory.
        exchange: what is done with a bucket, equal on all ranks.
        name: of the steps, equal on all ranks.
        numbers: how many 32-bit integers each step adds up over the ranks.
        streams: for each bucket the order of work on its device; the host's by default.
        counted: ranks that are not in the same step are told so.
        communicators: what the exchange communicates by; by default each rank counts as a node.

    Attributes:
        plan: as given.
        buffers: as given.
        name: as given.
        weight: what this rank counts in the average of the next steps; None for the plain one.
        rate: returns the learning rate, for an exchange that uses it.
        steps: how many steps the program has ended, also by plans before this one.
        numbers: of this step, zeros at first; to be there before its last bucket is launched.
        step: the present one.
    """

    def __init__(
        self,
        world: World,
        channel: Channel,
        plan: BucketPlan,
        buffers: Sequence[Buffer],
        exchange: Exchange,
        name: str,
        numbers: int = 0,
        streams: Sequence[Streams] | None = None,
        counted: bool = False,
        communicators: Communicators | None = None,
    ) -> None:
        self._world = world
        self._channel, self._exchange, self._counted = channel, exchange, counted
        self.name = name
        self.weight: float | None = None
        self.rate: Callable[[], float | None] = lambda: None
        self.steps = 0
        self._communicators = communicators
        self.numbers = np.zeros(numbers, np.int32)
        self.use(plan, buffers, streams)

    def use(
        self, plan: BucketPlan, buffers: Sequence[Buffer], streams: Sequence[Streams] | None = None
    ) -> None:
        """Reduce by another plan of the same gradients (between steps)."""
        for buffer in buffers:
            objection = self._channel.communicator.capabilities.objection(buffer, ReduceOp.SUM)
            if objection is not None:
                raise UnsupportedError(f"gradients: the engine does not take {objection}")
        self.plan, self.buffers = plan, buffers
        self.streams = streams or [HOST] * len(buffers)
        self.forget()

    def forget(self) -> None:
        """Begin with a new step (local)."""
        self.numbers = np.zeros_like(self.numbers)
        self._submitted = False
        numbers = Buffer.from_array(self.numbers)
        self.step = GradientStep(self.buffers, numbers, self._exchange, self.plan, self.streams)

    def put(self, source: Buffer, part: Buffer) -> None:
        """Copy a gradient in host memory into its part of a bucket, past the caches if it can."""
        self._channel.communicator.put(source, part)

    def ready(self, index: int) -> None:
        """Note that a gradient is in its bucket."""
        self.step.ready(index)

    def launch(self) -> None:
        """Reduce the buckets whose gradients are all ready, in the order of the plan."""
        self.step.launch_ready()
        # Without a thread of its own, the channel cannot wait for buckets: all go at the end.
        if self.step.launched and (self._channel.has_thread or self.step.complete):
            self.submit()

    def submit(self) -> None:
        """Let the other ranks know of this step, unless they do."""
        if self._submitted:
            return
        step, self._submitted = self.step, True
        step.number, step.weight, step.communicators = self.steps, self.weight, self._communicators
        if self._exchange.uses_rate:
            step.rate = self.rate()
        step.request = step_request(
            self.name,
            self.plan.digest,
            self.buffers,
            self.numbers.size,
            self._exchange,
            self._channel.counted(self.name) if self._counted else None,
        )
        try:
            self._channel.submit(step, at_once=True)
        except BaseException:
            self.forget()  # nobody will reduce it
            raise

    def wait_a_while(self) -> int:
        """Return how many buckets are reduced, when all launched ones are; raise what went wrong.

        Where another rank is blocked in an operation that this one has not submitted, it may
        have nothing for a bucket before it is through: then this returns, too.
        """
        step = self.step
        if not self._submitted:
            return 0
        if not self._channel.has_thread:
            self._wait_for_all()
        else:
            with self._world.blocked.running(), self._channel.waiting(step):
                all(self._wait_or_listen(future) for future in step.reduced[: step.launched])
        count = step.progress.reduced
        step.wait(count)
        return count

    def _wait_or_listen(self, future: Future[Mark]) -> bool:
        """Return whether a bucket is reduced, and not another rank blocked."""
        if not wait_for_futures([future], _LISTEN_AFTER_SECONDS).done:
            called = threading.Event()
            future.add_done_callback(lambda _: called.set())
            others = [c for c in self._world.channels() if c is not self._channel]
            try:
                for channel in others:
                    channel.listen(called.set)
                called.wait()
            finally:  # also when a signal's handler raises
                for channel in others:
                    channel.unlisten(called.set)
        if future.done():
            future.result()
        return future.done()

    def _wait_for_all(self) -> None:
        step = self.step
        with self._world.blocked.running(), self._channel.waiting(step):
            if not self._channel.has_thread:
                self._channel.wait(step)
            step.added.result()

    def finish(self) -> list[int]:
        """End a step whose gradients are all ready; return the sum of numbers (collective)."""
        self.step.launch_all()  # also what a signal's handler kept from being counted as ready
        self.submit()
        self._wait_for_all()
        self.step.wait(len(self.buffers))
        summed: list[int] = self.numbers.tolist()
        return summed

    def count_step(self) -> None:
        """Note that the program has ended a step, which the requests of steps carry (local)."""
        self._channel.count(self.name)
        self.steps += 1
