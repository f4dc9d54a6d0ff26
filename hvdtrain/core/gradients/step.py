"""The gradient step: one agreed operation, whose buckets need no further agreement."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core.agreement.operation import BucketTimes, Operation, Request
from hvdtrain.core.gradients.communicators import Communicators, communicators_of
from hvdtrain.core.gradients.exchange import Exchange, FilledBucket, StepInfo
from hvdtrain.core.gradients.plan import Bucket, BucketPlan
from hvdtrain.core.gradients.step_info import OwnStep, agree_on_step
from hvdtrain.engines.communicator import Communicator
from hvdtrain.streams import HOST, Mark, Place, Streams
from hvdtrain.types import ReduceOp

if TYPE_CHECKING:
    from hvdtrain.arrays import Array
    from hvdtrain.core.places import PlacedBucket


def unused_names(names: Sequence[str], sums: Sequence[int]) -> frozenset[str]:
    """Return the names of the parameters for which no rank had a gradient, if ranks told."""
    if len(sums) != usage_length(len(names)) or not sums[-2]:  # none has called write_usage()
        return frozenset()
    return frozenset(name for name, count in zip(names, sums, strict=False) if not count)


def usage_length(parameters: int) -> int:
    """Return the length of the array for this number of parameters."""
    return 3 * parameters + 2


def write_usage(
    numbers: np.typing.NDArray[np.int32],
    absent: Iterable[int],
    sparse: Iterable[int],
    arrivals: Sequence[int] | None,
    outdated: bool,
) -> None:
    used, kinds, positions = np.split(numbers[:-2], 3)
    used[:] = 1
    used[list(absent)] = 0
    kinds[list(sparse)] = 1
    if arrivals is not None:
        positions[:] = len(positions)
        positions[arrivals] = range(len(arrivals))
    numbers[-2:] = 1, outdated


@dataclass(frozen=True)
class StepUsage:
    """The sums over ranks; ranks that have joined contribute nothing."""

    used: list[int]
    sparse: list[int]
    positions: list[int]
    present: int
    outdated: int

    @property
    def unused(self) -> frozenset[int]:
        """The parameters for which some rank had no gradient."""
        return frozenset(i for i, count in enumerate(self.used) if count < self.present)

    @classmethod
    def from_sums(cls, numbers: list[int]) -> StepUsage:
        """Split the summed array into its parts."""
        *lists, present, outdated = numbers
        count = len(lists) // 3
        return cls(lists[:count], lists[count : 2 * count], lists[2 * count :], present, outdated)

    @property
    def with_dense(self) -> frozenset[int]:
        """The parameters of which some rank has a dense gradient."""
        pairs = enumerate(zip(self.used, self.sparse, strict=True))
        return frozenset(index for index, (used, sparse) in pairs if used > sparse)


# More than any number of backward passes: the program waits for the whole step.
UNTIL_STEP = 1 << 32


class BucketVerdict(NamedTuple):
    """What a vote tells a rank about the next bucket."""

    certain: int
    released: bool = False
    missed: bool = False


@dataclass(frozen=True)
class BucketProgress:
    """The number of buckets of a step that are filled, and of those that are reduced, in order.

    Ranks reduce a bucket when all have filled it, which they find out by a vote. A rank that has
    not filled the next bucket votes only between backward passes, because a pass may yet fill it.
    """

    total: int
    filled: int = 0
    reduced: int = 0
    passes: int = 0
    between: bool = False

    @property
    def complete(self) -> bool:
        """Whether all buckets are filled."""
        return self.filled == self.total

    @property
    def ready(self) -> bool:
        """Whether the next bucket to be reduced is filled."""
        return self.reduced < self.filled

    def fill(self, count: int = 1) -> BucketProgress:
        """Return the progress after filling the next `count` buckets."""
        if self.filled + count > self.total:
            raise ValueError(f"{self.filled} of {self.total} buckets are filled: no {count} more")
        return replace(self, filled=self.filled + count)

    def reduce(self) -> BucketProgress:
        """Return the progress after reducing the next bucket."""
        if not self.ready:
            raise ValueError(f"bucket {self.reduced} is not filled")
        return replace(self, reduced=self.reduced + 1)

    def begin_pass(self) -> BucketProgress:
        """Return the progress after the first gradient of a backward pass."""
        return replace(self, between=False)

    def end_pass(self) -> BucketProgress:
        return self if self.between else replace(self, between=True, passes=self.passes + 1)

    def vote(self, awaited: int) -> tuple[int, int, int]:
        """Return this rank's vote on the next bucket; ranks take the maximum of each number."""
        return self.total - self.filled, awaited, 0 if self.ready else UNTIL_STEP - self.passes

    def verdict(self, highest: Sequence[int]) -> BucketVerdict:
        """Return what follows from the maxima of all votes, this rank's among them."""
        missing, awaited, fewest = highest
        certain = self.total - missing
        if certain > self.reduced:
            return BucketVerdict(certain)
        ended = UNTIL_STEP - fewest  # by each of the ranks that have not filled it
        return BucketVerdict(certain, self.passes <= ended, awaited > ended and not self.ready)


# Between two votes on a bucket that some rank has not filled; at once when this rank fills it.
_FIRST_REST_SECONDS, _LONGEST_REST_SECONDS = 200e-6, 10e-3


class GradientStep(Operation):
    """Exchange a plan's buckets in order, in the channel's thread, each as soon as it is filled."""

    def __init__(
        self,
        buffers: Sequence[Buffer],
        numbers: Buffer,
        exchange: Exchange,
        plan: BucketPlan | None = None,
        streams: Sequence[Streams] | None = None,
        placed: Sequence[PlacedBucket | None] | None = None,
        missed: Callable[[], object] = bool,
    ) -> None:
        """`missed` tells blocked ranks that this one waits for them."""
        self._buffers, self._numbers = buffers, numbers
        self._exchange, self._plan = exchange, plan
        self._streams = streams or [HOST] * len(buffers)
        self._placed = placed or [None] * len(buffers)
        self._missed = missed
        self.own: OwnStep | None = None  # once it is submitted
        self.reduced: list[Future[Mark]] = [Future() for _ in buffers]
        self.added: Future[None] = Future()
        self.arrivals: list[int] = []
        self.passes: dict[int, int] = {}
        self.sparse: dict[int, Any] = {}
        self.begun = 0  # number of buckets that all ranks have filled, and reduce or have reduced
        self.delivered = 0
        self.awaited = 0
        self.released: Callable[[], object] = bool
        self._missing = [len(bucket.parameters) for bucket in plan.buckets] if plan else []
        self._places: list[set[Place]] = [set() for _ in buffers]
        self.progress = BucketProgress(len(buffers))
        self._certain = 0  # number of buckets of which this rank knows that all have filled them
        self._changed = threading.Condition()
        self._marks: list[Mark] = []
        self._filled: list[float] = []
        self._moves: list[tuple[float, float, float]] = []
        self._finite: list[Array] = []
        self.info: StepInfo | None = None

    def submitted_with(self, request: Request, own: OwnStep) -> GradientStep:
        """Note what this rank submits it with; return it."""
        self.request, self.own = request, own
        return self

    @property
    def launched(self) -> int:
        return self.progress.filled

    @property
    def all_launched(self) -> bool:
        return self.progress.complete

    @property
    def all_ready(self) -> bool:
        return not any(self._missing)

    def mark_ready(self, index: int) -> bool:
        """Mark a gradient as copied, in its stream's order; return whether its bucket is full."""
        assert self._plan is not None
        if self.progress.between:
            with self._changed:
                self.progress = self.progress.begin_pass()
        number = self._plan.bucket_of[index]
        streams = self._streams[number]
        if streams is not HOST:
            self._places[number].add(streams.place())
        self._missing[number] -= 1
        self.arrivals.append(index)
        return self._missing[number] == 0

    def launch_ready(self) -> None:
        while not self.all_launched and self._missing[self.launched] == 0:
            self.launch()

    def launch(self, count: int | None = 1) -> None:
        """Launch so many buckets, or all; one thread may abandon a step that another one fills."""
        with self._changed:
            first = self.launched
            last = len(self._buffers) if count is None else first + count
            self.progress = self.progress.fill(last - first)
            self._marks += [
                self._streams[number].mark(self._places[number] or None)
                for number in range(first, last)
            ]
            self._filled += [time.perf_counter()] * (last - first)
            self._changed.notify()

    def end_pass(self) -> None:
        with self._changed:
            self.progress = self.progress.end_pass()
            self._changed.notify()

    def wait(self, count: int) -> None:
        """Wait, on the current stream, for the reduction of the first `count` buckets."""
        for streams, reduced in zip(self._streams[:count], self.reduced, strict=False):
            streams.wait(reduced.result())

    def buckets(self) -> list[BucketTimes]:
        pairs = zip(self._buffers, self._filled, self._moves, strict=False)
        return [
            BucketTimes(number, buffer.nbytes, free, filled, began, ended)
            for number, (buffer, filled, (free, began, ended)) in enumerate(pairs)
        ]

    def awaited_since(self) -> float | None:
        return self._filled[-1] if self.all_launched and self._filled else None

    def abandon(self) -> None:
        # Other ranks may be blocked in any bucket, so contribute zeros.
        for number in range(self.launched, len(self._buffers)):
            # Asynchronous copies to or from a bucket in host memory may not be finished.
            streams = self._streams[number]
            streams.settle(streams.mark())
            self._buffers[number].zero()
            if (placed := self._placed[number]) is not None:
                placed.clear()
            self._places[number].add(streams.place())
        self.launch(None)

    @collective
    def execute(self, communicator: Communicator) -> None:
        communicators = communicators_of(communicator, self._exchange.hierarchical)
        assert self.own is not None
        placed, complete = any(self._placed), self.all_launched
        self.info = info = agree_on_step(self.own, placed, complete, communicator)
        if info.filled:
            self._certain = len(self._buffers)
        marks: list[Mark] = []
        needed = info.drifted or (info.flush and self._exchange.looks_ahead)
        for number in range(len(self._buffers)):
            free = time.perf_counter()
            filled = self._await_bucket(number, communicator)
            began, self.begun = time.perf_counter(), max(self._certain, number + 1)
            reduce = partial(self._reduce, self._bucket(number), info, communicators, needed)
            _, mark = self._streams[number].run_after(filled, reduce)
            self._moves.append((free, began, time.perf_counter()))
            marks.append(mark)
            if not (info.filled and info.placed):  # else ranks meet in the sum of the numbers
                self._note_reduced(mark)
        finite = not self._exchange.checks_finite or self._agree_on_finite(marks, communicator)
        communicator.allreduce(self._numbers, ReduceOp.SUM)
        communicator.confirm()
        for mark in marks[self.progress.reduced :]:
            self._note_reduced(mark)
        if self._exchange.checks_finite:
            names = [spec.name for spec in self._plan.specs] if self._plan else []
            unused = unused_names(names, self._numbers.array().tolist())
            info = replace(info, finite=finite, unused=unused)
        if needed:
            self._exchange.end(info)

    def end(self, result: object = None, error: BaseException | None = None) -> None:
        super().end(result, error)
        # Only now, because a thread that waits for these may submit the next step at once.
        if error is None:
            self.added.set_result(None)
        else:
            futures: list[Future[Mark] | Future[None]] = [*self.reduced, self.added]
            for future in futures:
                if not future.done():
                    future.set_exception(error)

    def _note_reduced(self, mark: Mark) -> None:
        with self._changed:
            number, self.progress = self.progress.reduced, self.progress.reduce()
        self.reduced[number].set_result(mark)

    def _reduce(
        self, bucket: FilledBucket, info: StepInfo, communicators: Communicators, needed: bool
    ) -> None:
        if needed:
            self._exchange.reduce(bucket, info, communicators)
        if self._exchange.checks_finite:
            from hvdtrain.arrays import all_finite

            self._finite.append(all_finite(bucket.elements))

    def _agree_on_finite(self, marks: Sequence[Mark], communicator: Communicator) -> bool:
        """Return whether the results of all ranks are finite; this waits for devices."""
        finite = np.ones(1, np.int32)
        for streams, mark, own in zip(self._streams, marks, self._finite, strict=True):
            finite[0] &= streams.run_after(mark, partial(bool, own))[0]
        communicator.allreduce(Buffer.from_array(finite), ReduceOp.MIN)
        return bool(finite[0])

    @collective
    def _await_bucket(self, number: int, communicator: Communicator) -> Mark:
        rest = _FIRST_REST_SECONDS
        # The first one is filled when a step is submitted, or soon, by the program alone.
        while self._certain <= number and number:
            verdict = self._vote(communicator)
            self._certain = verdict.certain
            if verdict.missed:
                self._missed()
            if verdict.certain <= number:
                self._rest(rest)
            rest = min(2 * rest, _LONGEST_REST_SECONDS)
        with self._changed:
            self._changed.wait_for(lambda: self.launched > number)
        return self._marks[number]

    @collective
    def _vote(self, communicator: Communicator) -> BucketVerdict:
        """Vote on the next bucket, unless a backward pass may yet fill it."""
        with self._changed:
            self._changed.wait_for(lambda: self.progress.ready or self.progress.between)
            votes = np.array(self.progress.vote(self.awaited), np.uint64)
        communicator.start_max(votes).wait()
        with self._changed:  # a pass that has ended meanwhile is not released by this vote
            verdict = self.progress.verdict(votes.tolist())
            if verdict.released:
                self.released()
        return verdict

    def _rest(self, seconds: float) -> None:
        """Rest between two votes, but not if this rank has filled the bucket."""
        with self._changed:
            before = self.progress
            if not before.ready:
                self._changed.wait_for(lambda: self.progress is not before, seconds)

    def _bucket(self, number: int) -> FilledBucket:
        buffer, plan = self._buffers[number], self._plan
        if plan is None:
            return FilledBucket(number, buffer, Bucket((), (), buffer.count, buffer.dtype), ())
        filled_at = self._filled[number]
        layout, placed = plan.buckets[number], self._placed[number]
        return FilledBucket(number, buffer, layout, plan.specs, filled_at, placed)
