"""Reduces the buckets of a plan, in plan order, beside the thread that fills them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from itertools import takewhile
from typing import Any

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.config import DEFAULT_BUCKET_BYTES
from hvdtrain.core import context, operations
from hvdtrain.core.bucket_size import BucketSize, choose_bucket_size, size_text
from hvdtrain.core.channel import Channel
from hvdtrain.core.collectives.measure import MeasureAllreduce
from hvdtrain.core.collectives.step import Step, StepState, step_request
from hvdtrain.core.objects import allgather_object, broadcast_object
from hvdtrain.core.plan import ParameterSpec, Plan, first_difference, make_plan, plan_of_layout
from hvdtrain.core.stopwatch import Stopwatch
from hvdtrain.errors import MismatchError, UnsupportedError
from hvdtrain.types import ReduceOp

__all__ = [
    "GradientReducer",
    "agree_on_bucket_size",
    "agree_on_plan",
    "close_unused_plans",
    "open_plan_channel",
    "replan",
    "take_layout",
    "use_bucket_size",
]

_logger = logging.getLogger("hvdtrain")

# Buckets begin on lines of the cache, which two of them never share.
_ALIGNMENT_BYTES = 128

# Why buckets are as large as they are, where a checkpoint says so.
_AS_BEFORE = "as before the run went on"

# Ranks are nearly always closer together than this.
_LISTEN_AFTER_SECONDS = 0.02


def agree_on_bucket_size(channel: Channel) -> BucketSize:
    """Return the limit of a bucket, as the set's first rank was given it or as measured once.

    Collective over the channel's ranks. One rank alone has the default.
    """
    here = context.current()
    kept = here.bucket_sizes.get(channel)
    if kept is not None:
        return kept
    # Ranks on other hosts may not have the first one's environment.
    given = broadcast_object(here.config.bucket_bytes, channel.ranks[0], "bucket size", channel)
    if given is not None:
        size = BucketSize(given, "as set")
    elif len(channel.ranks) == 1:
        size = BucketSize(DEFAULT_BUCKET_BYTES, "the default for one rank")
    else:
        size = choose_bucket_size(operations.Submitted(channel, MeasureAllreduce()).run())
    here.bucket_sizes[channel] = size
    return size


def use_bucket_size(nbytes: int | None, channel: Channel) -> None:
    """Cut buckets as large as those of an earlier run were, whatever is set or measured now.

    Collective over the channel's ranks, before their first reduction; the first rank's size counts,
    and None changes nothing. What the size was: `context.current().bucket_sizes[channel].nbytes`.
    """
    nbytes = broadcast_object(nbytes, channel.ranks[0], "bucket size", channel)
    if nbytes is not None:
        context.current().bucket_sizes[channel] = BucketSize(nbytes, _AS_BEFORE)


def agree_on_plan(
    specs: list[ParameterSpec],
    channel: Channel,
    groups: Sequence[Sequence[int]] = (),
) -> Plan:
    """Make the plan of the set's first rank on every rank (collective).

    That rank tells the logger "hvdtrain" about it.

    Args:
        specs: the parameters, in the order of the model.
        channel: of the ranks that share the plan.
        groups: indices of parameters that are reduced together, instead of by size.

    Raises:
        MismatchError: the parameters of a rank differ from the first rank's; the first is named.
    """
    here = context.current()
    limit = agree_on_bucket_size(channel)
    own = make_plan(specs, limit.nbytes, here.config.first_bucket_bytes, groups)
    root_rank = channel.ranks[0]
    plan: Plan = broadcast_object(own, root_rank, "bucket plan", channel)
    differences = allgather_object(
        first_difference(specs, plan.specs, root_rank), "bucket plan", channel
    )
    for rank, difference in zip(channel.ranks, differences, strict=True):
        if difference is not None:
            raise MismatchError(
                f"[rank {rank}/{here.topology.size}] DistributedOptimizer: {difference}. Build "
                "the same model on every rank"
            )
    here.buckets = _description(plan, limit.reason)
    if here.topology.rank == root_rank:
        _logger.info("buckets: %s", here.buckets)
    return plan


def take_layout(plan: Plan, layout: Mapping[str, Any] | None, channel: Channel) -> Plan:
    """Return the plan with the layout that the channel's first rank has (collective).

    Args:
        plan: of the parameters.
        layout: of an earlier plan; None, on that rank, leaves the plan as it is.
        channel: of the ranks that share the plan.

    Raises:
        ValueError: it is a layout of other parameters.
    """
    taken = broadcast_object(layout, channel.ranks[0], "bucket plan", channel)
    if taken is None:
        return plan
    plan = plan_of_layout(plan, taken)
    context.current().buckets = _description(plan, _AS_BEFORE)
    return plan


def _description(plan: Plan, reason: str) -> str:
    return (
        f"{len(plan.buckets)} for {size_text(plan.nbytes)} of gradients, at most "
        f"{size_text(plan.bucket_bytes)} each ({reason})"
    )


def replan(plan: Plan, places: Sequence[int]) -> Plan:
    """Make a plan for the order in which gradients came.

    Args:
        plan: the first one.
        places: for each parameter its place in that order, summed over ranks.
    """
    order = sorted(range(len(places)), key=lambda index: (places[index], -index))
    return make_plan(plan.specs, plan.bucket_bytes, plan.first_bucket_bytes, plan.groups, order)


def open_plan_channel(parent: Channel) -> Channel:
    """Make a channel with the members of `parent` (collective over them)."""
    close_unused_plans(parent)
    here = context.current()
    channel = here.open_channel(range(len(parent.ranks)), f"bucket plan of {parent.label}", parent)
    assert channel is not None  # every rank of the parent is a member
    return channel


def close_unused_plans(parent: Channel) -> None:
    """Give back the channels of plans that no member needs any more (collective over them).

    A communicator can only be freed by all its members together, and each MPI has but so many.
    """
    here = context.current()
    mine = [c for c in here.channels() if c.parent is parent]
    unused = allgather_object([c.unused for c in mine], "unused plans", parent)
    for old, everywhere in zip(mine, map(all, zip(*unused, strict=True)), strict=True):
        if everywhere:
            here.close_channel(old)


class GradientReducer:
    """Reduces the buckets of one plan over the ranks of a channel.

    One thread fills `buffers` and calls the methods; with an engine that allows it, the
    channel's thread moves the bytes meanwhile.

    Args:
        channel: of the plan's own.
        plan: equal on all ranks.
        op: AVERAGE (weighted by `sample_weight`), SUM or ADASUM.
        blocked: counts how long the calling thread waits.
        numbers: how many.
        prescale: factor before the reduction.
        postscale: factor after it.

    Attributes:
        buffers: for each bucket its memory.
        numbers: 32-bit integers, zero at first, that each step adds up over the ranks; they are
            to be there before the last bucket is launched.
        sample_weight: what this rank counts in the average of the next steps; None for the
            plain average.
    """

    def __init__(
        self,
        channel: Channel,
        plan: Plan,
        op: ReduceOp,
        blocked: Stopwatch,
        numbers: int,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        communicator = channel.communicator
        self.sample_weight: float | None = None
        self._channel, self._blocked = channel, blocked
        self._op, self._prescale, self._postscale = op, prescale, postscale
        self._memory = communicator.empty(
            sum(spec.nbytes + _ALIGNMENT_BYTES for spec in plan.specs)
        )
        self.numbers = np.zeros(numbers, np.int32)
        self._state: StepState | None = None
        self._step: Step | None = None
        self.use_plan(plan)
        for buffer in self.buffers:
            objection = communicator.capabilities.objection(buffer, ReduceOp.SUM)
            if objection is not None:
                raise UnsupportedError(f"gradients: the engine does not take {objection}")

    def use_plan(self, plan: Plan) -> None:
        """Cut the memory into the buckets of a plan for the same parameters (between steps)."""
        self.buffers = []
        start = 0
        for bucket in plan.buckets:
            nbytes = bucket.count * bucket.dtype.itemsize
            elements = self._memory[start : start + nbytes].view(bucket.dtype.numpy)
            self.buffers.append(Buffer.from_array(elements, bucket.dtype))
            start += -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._request = step_request(
            plan.digest, self.buffers, self.numbers.size, self._op, self._postscale
        )

    def put(self, source: Buffer, part: Buffer) -> None:
        """Copy a gradient into its part of a bucket, past the caches where the engine can."""
        self._channel.communicator.put(source, part)

    @property
    def launched(self) -> int:
        """How many buckets of this step are on their way or done."""
        return self._state.launched if self._state is not None else 0

    @property
    def complete(self) -> bool:
        """Whether all buckets of this step are on their way or done."""
        return self.launched == len(self.buffers)

    def launch(self) -> None:
        """Reduce the next bucket of the plan, whose memory is filled."""
        if self._state is None:
            self._state = StepState(
                self.buffers,
                Buffer.from_array(self.numbers),
                self._op,
                self.sample_weight,
                self._prescale,
                self._postscale,
            )
        self._state.launch()
        # Without a thread of its own, the channel cannot wait for buckets: all go at the end.
        if self._step is None and (self._channel.has_thread or self._state.complete):
            self._step = Step(self._state, self._request)
            try:
                self._channel.submit(self._step, at_once=True)
            except BaseException:
                self.forget()  # nobody will reduce it
                raise

    @property
    def reduced(self) -> int:
        """How many buckets of this step are reduced."""
        done = [] if self._state is None else self._state.done
        return sum(1 for _ in takewhile(Future.done, done))

    def wait_a_while(self) -> None:
        """Block until all launched buckets are reduced; raise what went wrong.

        Where another rank is blocked in an operation that this one has not submitted, it may
        have nothing for a bucket before it is through: then this returns, too.
        """
        if self._state is None or self._step is None:
            return
        if not self._channel.has_thread:
            self._wait_for_all(self._state, self._step)
            return
        with self._blocked.running(), self._channel.waiting():
            for future in self._state.done[: self._state.launched]:
                if not self._wait_or_listen(future):
                    return

    def _wait_or_listen(self, future: Future[None]) -> bool:
        """Tell whether a bucket is reduced, and not another rank blocked."""
        if not wait_for_futures([future], _LISTEN_AFTER_SECONDS).done:
            called = threading.Event()
            future.add_done_callback(lambda _: called.set())
            others = [c for c in context.current().channels() if c is not self._channel]
            try:
                for channel in others:
                    channel.listen(called.set)
                called.wait()
            finally:  # also when a signal's handler raises
                for channel in others:
                    channel.listen(None)
        if future.done():
            future.result()
        return future.done()

    def _wait_for_all(self, state: StepState, step: Step) -> None:
        with self._blocked.running(), self._channel.waiting():
            if not self._channel.has_thread:
                self._channel.wait(step)
            for future in (*state.done, state.added):
                future.result()

    def forget(self) -> None:
        """Begin with a new step (local)."""
        self._state = self._step = None
        self.numbers = np.zeros_like(self.numbers)

    def finish(self) -> list[int]:
        """End a step whose buckets are all launched; return the sum of numbers (collective)."""
        assert self._state is not None
        assert self._step is not None
        self._wait_for_all(self._state, self._step)
        summed: list[int] = self.numbers.tolist()
        self.forget()
        return summed
