"""The stall watch: finds operations that wait too long, and the ranks that are missing.

Each rank has a thread and a communicator for it. The threads communicate about once a second,
without blocking, so that reports do not depend on a rank that is stopped or that is in code which
keeps Python from running.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import dropwhile
from queue import SimpleQueue
from types import FrameType
from typing import TypeVar

import numpy as np

from hvdtrain.collective import collective
from hvdtrain.config import Config
from hvdtrain.core.agreement.channel import Channel, Stopwatch
from hvdtrain.core.agreement.operation import JOIN, LEAVE
from hvdtrain.core.exits import drain_output, write_message
from hvdtrain.engines.communicator import Communicator
from hvdtrain.errors import EXIT_CRASH, HvdtrainError
from hvdtrain.topology import Topology, format_ranks, shortened

# Members of the channel, number of the channel among those with these members, and request key.
# Each rank sends it to all: as a range, members take few bytes.
OperationId = tuple[tuple[int, ...] | range, int, str]

_MARKERS = (JOIN.key, LEAVE.key)


@dataclass(frozen=True)
class StallSettings:
    """Settings of the stall watch, the same on all ranks."""

    period_seconds: float
    shutdown_seconds: float
    stacks: bool

    def periods(self, seconds: float) -> int:
        """Return how many reports are due for a wait of this length."""
        return int(seconds // self.period_seconds) + (seconds >= self.shutdown_seconds)


@dataclass(frozen=True)
class Wait:
    """One rank's pending operation, and its wait for others; None while it waits for this rank."""

    id: OperationId
    subject: str
    seconds: float | None


@dataclass(frozen=True)
class Stall:
    """A stalled operation."""

    id: OperationId
    subject: str
    seconds: float
    waiting: tuple[int, ...]
    missing: tuple[int, ...] = ()
    partial: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    unknown: str = ""

    @property
    def is_marker(self) -> bool:
        """Whether this is a request to join or to leave."""
        return self.id[2] in _MARKERS


def find_stalls(waits: Sequence[Sequence[Wait]], period_seconds: float) -> list[Stall]:
    """Return the stalled operations, the oldest first.

    The age of an operation is that on the rank which waits longest if ranks are missing, and on the
    rank that came last otherwise. Requests to join or to leave are reported only if nothing else is
    stalled, because ranks that are blocked elsewhere delay them.
    """
    by_id: dict[OperationId, dict[int, Wait]] = {}
    for rank, own in enumerate(waits):
        for wait in own:
            by_id.setdefault(wait.id, {})[rank] = wait
    stalls = [stall for id in by_id if (stall := _stall(id, by_id)) is not None]
    return _choose(stalls, period_seconds, size=len(waits))


def _choose(stalls: Sequence[Stall], period_seconds: float, size: int) -> list[Stall]:
    old = [stall for stall in stalls if stall.seconds >= period_seconds]
    # The same request is submitted on every channel; only the world's is reported.
    world = (size, 0)
    markers = [s for s in old if s.is_marker and (len(s.id[0]), s.id[1]) == world]
    ordinary = [stall for stall in old if not stall.is_marker]
    return sorted(ordinary or markers, key=lambda stall: -stall.seconds)


def _stall(id: OperationId, by_id: dict[OperationId, dict[int, Wait]]) -> Stall | None:
    members, number, _ = id
    holders = by_id[id]
    seconds = {rank: w.seconds for rank, w in holders.items() if w.seconds is not None}
    if not seconds:
        return None
    absent = [rank for rank in members if rank not in holders]
    left = [rank for rank in absent if rank in by_id.get((members, number, LEAVE.key), {})]
    joined = [rank for rank in absent if rank in by_id.get((members, number, JOIN.key), {})]
    joined = [rank for rank in joined if rank not in left]
    missing = [rank for rank in absent if rank not in (*joined, *left)]
    partial = [rank for rank in holders if rank not in seconds]
    age = max if missing or partial or left else min
    return Stall(
        id=id,
        subject=next(iter(holders.values())).subject,
        seconds=age(seconds.values()),
        waiting=tuple(sorted(seconds)),
        missing=tuple(missing),
        partial=tuple(sorted(partial)),
        joined=tuple(joined),
        left=tuple(left),
    )


def describe(stall: Stall) -> str:
    """Return one line that says which ranks wait for which."""
    wait = "wait" if len(stall.waiting) > 1 else "waits"
    text = f"{stall.subject} for {stall.seconds:.0f} s: {format_ranks(stall.waiting)} {wait}"
    if stall.unknown:
        return f"{text}, and {stall.unknown}"
    late = sorted((*stall.missing, *stall.partial))
    if late:
        text += f" for {format_ranks(late)}"
    elif not stall.left:
        text += ", and nobody is missing: the engine does not get on, or has much to move"
    if stall.partial:
        text += f"; {format_ranks(stall.partial)} submitted a part of it"
    if stall.joined:
        text += f"; {format_ranks(stall.joined)} joined"
    if stall.left:
        text += f"; {format_ranks(stall.left)} left"
    return text


_MORE = " operations"
_ADVICE = "Every rank must submit the same operations: see what those ranks do instead"
_OFFER = " (HVDTRAIN_STALL_STACKS=1 shows it)"


class StallWarnings:
    """Warns on stderr, once per period for each stall."""

    def __init__(
        self,
        settings: StallSettings,
        topology: Topology,
        abort: Callable[[int], None],
        save: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._topology = topology
        self._abort = abort
        self.save = save
        self._reported: dict[OperationId, Stall] = {}

    def update(self, stalls: Sequence[Stall], stacks: Callable[[], Mapping[int, str]]) -> None:
        """Report new and ended stalls; end the job if a stall is too old."""
        found = {stall.id: stall for stall in stalls}
        over = [stall for id, stall in self._reported.items() if id not in found]
        if over:
            self._say(f"no longer stalled: {shortened([s.subject for s in over], ', ', _MORE)}")
        self._reported = {id: s for id, s in self._reported.items() if id in found}
        if any(map(self._is_due, stalls)):
            self._warn(stalls, stacks)
            self._reported = found
        for stall in stalls:
            if stall.seconds >= self._settings.shutdown_seconds and not stall.is_marker:
                self._end_job(stall)

    def _is_due(self, stall: Stall) -> bool:
        before = self._reported.get(stall.id)
        periods = self._settings.periods
        return periods(stall.seconds) > (periods(before.seconds) if before else 0)

    def _warn(self, stalls: Sequence[Stall], stacks: Callable[[], Mapping[int, str]]) -> None:
        self.save("; ".join(map(describe, stalls)))
        self._say(shortened([f"stalled: {describe(s)}" for s in stalls], "\n", _MORE))
        if any((s.missing or s.partial) and not s.is_marker for s in stalls):
            self._say(_ADVICE if self._settings.stacks else _ADVICE + _OFFER)
        if self._settings.stacks:
            found: dict[str, list[int]] = {}
            for rank, text in stacks().items():
                found.setdefault(text, []).append(rank)
            for text, ranks in found.items():
                write_message(f"[{format_ranks(ranks)}/{self._topology.size}]", text)

    def _end_job(self, stall: Stall) -> None:
        seconds = self._settings.shutdown_seconds
        said = f"the job ends (HVDTRAIN_STALL_SHUTDOWN_SECONDS={seconds:g}): {describe(stall)}"
        self.save(said)
        self._say(said)
        drain_output()
        self._abort(EXIT_CRASH)

    def _say(self, text: str) -> None:
        write_message(self._topology.title, text)


def thread_stacks() -> str:
    """Return the Python stacks of all other threads, with the main thread first."""
    frames = sys._current_frames()
    threads = sorted(threading.enumerate(), key=lambda t: t is not threading.main_thread())
    return "".join(
        f"{thread.name}, most recent call last:\n{_stack(frames[thread.ident])}"
        for thread in threads
        if thread is not threading.current_thread() and thread.ident in frames
    )


def _stack(frame: FrameType) -> str:
    # Omit the frames in which Python starts a thread.
    calls = dropwhile(
        lambda call: call.filename == threading.__file__, traceback.extract_stack(frame)
    )
    return "".join(traceback.format_list(list(calls)))


T = TypeVar("T")

_LONGEST_PAUSE_SECONDS = 1.0
_POLL_SECONDS = 0.05
_LAST_POLL_SECONDS = 1e-3  # at the end of the job, when all ranks take part


@collective
def watch_stalls(
    communicator: Communicator,
    config: Config,
    topology: Topology,
    pending: Callable[[], list[Wait]],
    abort: Callable[[int], None],
    save: Callable[[str], None],
) -> StallWatch | None:
    """Start the stall watch of this rank; return None if it is off."""
    settings = _agree(communicator, config)
    if settings is None:
        return None
    # Without support for several threads a rank knows only its own operations.
    beside = communicator.capabilities.concurrent
    own = communicator.split(range(communicator.size)) if beside else None
    warnings = StallWarnings(settings, topology, abort, save)
    return StallWatch(own, settings, topology, pending, warnings)


def _agree(communicator: Communicator, config: Config) -> StallSettings | None:
    """Return the largest settings of all ranks, so that they are the same everywhere."""
    own = [config.stall_seconds, config.stall_shutdown_seconds, config.stall_stacks]
    # Non-negative floating-point numbers are ordered like their bits.
    numbers = np.array(own, np.float64)
    communicator.start_max(numbers.view(np.uint64)).wait()
    seconds, shutdown_seconds, stacks = numbers.tolist()
    shutdown_seconds = shutdown_seconds or float("inf")
    if not seconds:
        return None
    return StallSettings(min(seconds, shutdown_seconds), shutdown_seconds, bool(stacks))


def pending_on(channels: Sequence[Channel], blocked: Stopwatch) -> list[Wait]:
    """Return the pending operations of this rank."""
    now = time.perf_counter()
    progressed = max(channel.queue.progressed for channel in channels)
    waits = []
    for channel in channels:
        begun = 0.0 if channel.has_thread else blocked.since or now
        members = compact(channel.ranks)
        for request, since in channel.pending():
            if since is not None:
                # A joined rank waits while others work, which is not a stall.
                last = progressed if request in (JOIN, LEAVE) else 0.0
                since = max(since, begun, last)
            id = (members, channel.number, request.key)
            waits.append(Wait(id, request.subject, None if since is None else now - since))
    return waits


def compact(ranks: Sequence[int]) -> tuple[int, ...] | range:
    """Return ranks as a range if they are at equal distances."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    whole = range(ranks[0], ranks[0] + step * len(ranks), step)
    return whole if list(ranks) == list(whole) else tuple(ranks)


class StallWatch:
    """Watches the operations of this rank, from its creation to stop()."""

    def __init__(
        self,
        communicator: Communicator | None,
        settings: StallSettings,
        topology: Topology,
        pending: Callable[[], list[Wait]],
        warnings: StallWarnings,
    ) -> None:
        self._communicator = communicator
        self._settings = settings
        self._topology = topology
        self._pending = pending
        self._warnings = warnings
        self._compared: dict[OperationId, int] = {}  # period of each wait at the last comparison
        self._stopping = threading.Event()
        self._abandoned = False
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # Both from the beginning: ranks may also wait while Python exits and starts no threads.
        self._threads = [
            threading.Thread(target=self._watch, name="hvdtrain-stall", daemon=True),
            threading.Thread(target=self._call, name="hvdtrain-stall-calls", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @collective
    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        if self._communicator is not None:
            self._communicator.close()

    def abandon(self) -> None:
        """End the watch when ranks have ended and engine calls fail."""
        self._abandoned = True
        self.stop()

    def _watch(self) -> None:
        pause_seconds = min(self._settings.period_seconds / 4, _LONGEST_PAUSE_SECONDS)
        try:
            while self._look():
                self._rest(max(pause_seconds, _POLL_SECONDS))
        except Exception as error:
            # The connection to a rank is lost, which operations with that rank report.
            communicator = self._communicator
            explained = error if communicator is None else communicator.explained(error)
            if not isinstance(explained, HvdtrainError):
                raise
        self._calls.put(None)

    def _call(self) -> None:
        """Run blocking calls in a thread of their own."""
        for call in iter(self._calls.get, None):
            call()

    def _rest(self, seconds: float) -> None:
        if self._stopping.is_set():
            time.sleep(_LAST_POLL_SECONDS)
        else:
            self._stopping.wait(seconds)

    def _look(self) -> bool:
        """Check for stalls on any rank; return whether to continue."""
        if self._communicator is None:
            self._report_alone("this engine cannot tell which ranks are missing")
            return not self._stopping.is_set()
        periods = self._periods(self._pending())
        # An operation may have the same name as an earlier one.
        self._compared = {id: min(n, self._compared.get(id, 0)) for id, n in periods.items()}
        news = any(n > self._compared[id] for id, n in periods.items())
        flags = np.array([self._stopping.is_set(), any(periods.values()), news], np.uint64)
        self._await(self._communicator.start_max(flags).test)
        stopping, stalled, news = flags.tolist()
        if news and not stopping:
            self._compare(self._communicator)
        elif stopping or not stalled:
            self._warnings.update([], dict)
        return not stopping

    def _periods(self, waits: Sequence[Wait]) -> dict[OperationId, int]:
        return {wait.id: self._settings.periods(wait.seconds or 0.0) for wait in waits}

    @collective
    def _compare(self, communicator: Communicator) -> None:
        """Gather the pending operations of all ranks, and report stalls on rank 0."""
        started, waits = time.perf_counter(), self._pending()
        self._compared = self._periods(waits)
        own = (waits, thread_stacks() if self._settings.stacks else "")
        first = communicator.rank == 0
        gathered = self._result_of(lambda: communicator.gather_objects(own, wanted=first))
        is_news = time.perf_counter() - started < self._settings.period_seconds
        if first and is_news:
            stalls = find_stalls([waits for waits, _ in gathered], self._settings.period_seconds)
            stacks = {rank: stacks for rank, (_, stacks) in enumerate(gathered)}
            self._warnings.update(stalls, lambda: stacks)
        elif not first:
            self._warnings.save("another rank reports a stall")

    def _result_of(self, function: Callable[[], T]) -> T:
        """Return the result of a blocking function; a rank may stop answering during the call."""
        result: Future[T] = Future()

        def call() -> None:
            try:
                result.set_result(function())
            except Exception as error:
                result.set_exception(error)

        self._calls.put(call)
        self._await(result.done)
        return result.result()

    def _await(self, test: Callable[[], bool]) -> None:
        """Wait until `test` is true; report this rank's own stalls if that takes too long."""
        started = time.perf_counter()
        while not test():
            if self._abandoned:
                raise HvdtrainError("ranks have ended")
            self._rest(_POLL_SECONDS)
            silent_seconds = time.perf_counter() - started
            if silent_seconds >= self._settings.period_seconds:
                self._report_alone(
                    f"a rank that prints no such line has not answered for {silent_seconds:.0f} s: "
                    "it is stopped, or in code that keeps Python from running"
                )

    def _report_alone(self, unknown: str) -> None:
        """Report the stalls that this rank knows of by itself."""
        rank = self._topology.rank
        stalls = [
            Stall(wait.id, wait.subject, wait.seconds, waiting=(rank,), unknown=unknown)
            for wait in self._pending()
            if wait.seconds is not None
        ]
        chosen = _choose(stalls, self._settings.period_seconds, self._topology.size)
        self._warnings.update(chosen, lambda: {rank: thread_stacks()})
