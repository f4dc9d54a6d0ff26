"""The reducer: reduces gradients by a bucket plan, while another thread fills the buckets."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.agreement.operation import STEPS, Request, device_details, device_types
from hvdtrain.core.gradients.exchange import Exchange, Kind
from hvdtrain.core.gradients.plan import STEP, BucketPlan
from hvdtrain.core.gradients.step import UNTIL_STEP, GradientStep
from hvdtrain.core.gradients.step_info import OwnStep
from hvdtrain.errors import UnsupportedError
from hvdtrain.streams import HOST, Mark, Streams
from hvdtrain.types import DType, ReduceOp

if TYPE_CHECKING:
    from hvdtrain.core.places import PlacedBucket


def step_request(
    name: str,
    digest: str,
    buffers: Sequence[Buffer],
    numbers: int,
    exchange: Exchange,
    step: int | None = None,
) -> Request:
    devices = device_types(buffers)
    details = (
        ("exchange", exchange.spec),
        ("plan", digest),
        *device_details(devices),
        *(() if step is None else ((STEPS, str(step)),)),
    )
    kinds = (*((buffer.count, buffer.dtype) for buffer in buffers), (numbers, DType.INT32))
    zeros = exchange.zeros(kinds)
    if zeros is None:
        return Request(STEP, name, details, None, _instead_of_join(exchange))
    return Request(STEP, name, details, replace(zeros, devices=(*devices, "cpu")))


def _instead_of_join(exchange: Exchange) -> str:
    what = (
        "call flush()" if exchange.kind is Kind.WEIGHTS else "take its steps with sample_weight=0"
    )
    return (
        f"exchange {exchange.spec!r} needs all ranks: let a rank without data {what} instead of "
        "join()"
    )


# Ranks rarely wait longer than this for one another.
_LISTEN_AFTER_SECONDS = 0.02


class ReducerContext(Protocol):
    """The part of `core.context.Context` that a reducer uses."""

    process_sets: dict[int, list[int]]

    def channels(self) -> Sequence[Channel]:
        """Return all open channels of this rank."""


def linked(ranks: Collection[int], groups: Sequence[Collection[int]]) -> set[int]:
    """Return these ranks, and those that they may wait for in the groups, directly or not."""
    found = set(ranks)
    while wider := [g for g in groups if not found.isdisjoint(g) and not found.issuperset(g)]:
        found.update(*wider)
    return found


class Reducer:
    """Reduces gradients by a plan over the ranks of a channel, one step at a time.

    One thread fills `buffers` and calls the methods. If the engine allows it, the channel's thread
    communicates meanwhile. In each step, call `step.mark_ready` for each gradient in its bucket,
    `launch`, `finish`, and then `forget`. The first call that submits the step decides with what.
    """

    def __init__(
        self,
        context: ReducerContext,
        channel: Channel,
        exchange: Exchange,
        name: str,
        plan: BucketPlan,
        buffers: Sequence[Buffer],
        streams: Sequence[Streams] | None = None,
        placed: Sequence[PlacedBucket | None] | None = None,
        numbers: int = 0,
        counted: bool = False,
    ) -> None:
        self._context, self.together = context, False
        self.channel, self.exchange, self.name, self._counted = channel, exchange, name, counted
        self.numbers = np.zeros(numbers, np.int32)
        self.use(plan, buffers, streams, placed)

    def use(
        self,
        plan: BucketPlan,
        buffers: Sequence[Buffer],
        streams: Sequence[Streams] | None = None,
        placed: Sequence[PlacedBucket | None] | None = None,
    ) -> None:
        """Use another plan of the same gradients; call between steps."""
        for buffer in buffers:
            objection = self.channel.communicator.capabilities.unsupported(buffer, ReduceOp.SUM)
            if objection is not None:
                raise UnsupportedError(f"gradients: the engine does not take {objection}")
        self.plan, self.buffers = plan, buffers
        self.streams = streams or [HOST] * len(buffers)
        self.placed = placed or [None] * len(buffers)
        self.forget()

    def forget(self) -> None:
        """Discard the present step and prepare the next one."""
        self.numbers = np.zeros_like(self.numbers)
        self.step = GradientStep(
            self.buffers,
            Buffer.from_array(self.numbers),
            self.exchange,
            self.plan,
            self.streams,
            self.placed,
            partial(self.channel.call_listeners, self.channel.ranks),
        )

    def launch(self, pass_ended: bool = False) -> bool:
        """Launch the buckets whose gradients are all ready; return whether to submit the step.

        If `together`, they wait until all gradients are ready or `pass_ended`, of a backward pass.
        """
        early = not self.step.all_ready
        if early and (self.exchange.at_once or (self.together and not pass_ended)):
            return False
        self.step.launch_ready()  # in the order of the plan
        if self.step.own is not None or not self.step.launched:
            return False
        # A channel without a thread cannot wait for buckets, so all are reduced at the end.
        return self.channel.has_thread or self.step.all_launched

    def submit(self, own: OwnStep) -> None:
        """Submit this step to the channel, unless that is done."""
        if self.step.own is not None:
            return
        request = step_request(
            self.name,
            self.plan.digest + own.variant,
            self.buffers,
            self.numbers.size,
            self.exchange,
            self.channel.counted(self.name) if self._counted else None,
        )
        try:
            self.channel.submit(self.step.submitted_with(request, own), hurry=True)
        except BaseException:
            self.forget()  # it will not be reduced
            raise

    def wait_for_launched(self) -> int:
        """Wait until all launched buckets are reduced; return how many are.

        Call it at the end of each backward pass. It does not wait for a bucket that some rank has
        not filled in as many passes. It also returns early if another rank is blocked in an
        operation that needs this one, because that rank may be unable to fill its buckets before.
        """
        step = self.step
        step.end_pass()
        # This rank fills no buckets of other plans either while it waits.
        for channel in self._context.channels():
            channel.end_pass()
        if step.own is None or not step.launched:
            return 0
        if not self.channel.has_thread:
            self._wait_for_all()
        else:
            with self._waiting(step.progress.passes):
                self._wait_or_listen(step.reduced[step.launched - 1])  # in their order
        count = step.progress.reduced
        step.wait(count)
        return count

    @contextmanager
    def _waiting(self, awaited: int) -> Iterator[None]:
        """Return a context in which the program waits for the present step."""
        step = self.step
        step.awaited = awaited
        try:
            with self.channel.blocked.running(), self.channel.waiting(step):
                yield
        finally:
            step.awaited = 0

    def _wait_or_listen(self, future: Future[Mark]) -> None:
        """Wait for a bucket, or until this rank must not wait for it any more."""
        step, called = self.step, threading.Event()

        # A rank that is blocked may have its results already, and this one will have them, too. One
        # outside the step's ranks delays a bucket only if one of these waits for it: in the same
        # channel, and then both are named here, or in another one, which links them.
        def missed(concerned: set[int], blocked: Sequence[int]) -> None:
            if step.begun < step.launched and not concerned.isdisjoint(blocked):
                called.set()

        future.add_done_callback(lambda _: called.set())
        step.released = called.set
        if not called.wait(_LISTEN_AFTER_SECONDS):
            listeners = [
                (channel, partial(missed, self._concerned(channel)))
                for channel in self._context.channels()
                if channel is not self.channel
            ]
            try:
                for channel, listener in listeners:
                    channel.listen(listener)
                called.wait()
            finally:  # also when a signal's handler raises
                for channel, listener in listeners:
                    channel.unlisten(listener)
        if future.done():
            future.result()
        elif step.begun:  # the others may have these results already
            step.reduced[step.begun - 1].result()

    def _concerned(self, channel: Channel) -> set[int]:
        """Return the ranks that may delay a bucket while they are blocked in another channel."""
        groups = [other.ranks for other in self._context.channels() if other is not channel]
        return linked(self.channel.ranks, [*groups, *self._context.process_sets.values()])

    def _wait_for_all(self) -> None:
        step = self.step
        with self._waiting(UNTIL_STEP):
            if not self.channel.has_thread:
                self.channel.wait(step)
            step.added.result()

    @collective
    def finish(self, own: OwnStep) -> list[int]:
        """Complete the step; return `numbers`, summed over the ranks."""
        self.step.launch(None)  # a signal handler may have kept one from being counted as ready
        self.submit(own)
        self._wait_for_all()
        self.step.wait(len(self.buffers))
        summed: list[int] = self.numbers.tolist()
        return summed

    def count_step(self) -> None:
        """Count a step of the program, for the requests of the next steps."""
        self.channel.count(self.name)
