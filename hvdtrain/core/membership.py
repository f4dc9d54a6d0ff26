"""The world that this process has joined, with its channels."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.config import Config
from hvdtrain.core.agreement.channel import KNOWN_CALLS, Channel, FirstUse, Stopwatch
from hvdtrain.core.agreement.operation import Operation, Request, Zeros
from hvdtrain.core.gathers import split
from hvdtrain.core.tuning import restore_switch_interval, shorten_switch_interval
from hvdtrain.engines.communicator import Communicator, EngineWorld, Failures, poll_until
from hvdtrain.errors import RanksLostError
from hvdtrain.topology import Topology, format_ranks
from hvdtrain.types import DType, ReduceOp

if TYPE_CHECKING:  # what few jobs use is imported where it is used
    from hvdtrain.core.gradients.exchange import Exchange
    from hvdtrain.core.gradients.plan import BucketSize
    from hvdtrain.core.recruiter import Recruiter
    from hvdtrain.core.stall import StallWatch, Wait
    from hvdtrain.core.timeline.flight import FlightRecord, History
    from hvdtrain.core.timeline.recorder import Recorder
    from hvdtrain.core.timeline.start_stop import Recording


def answer_with_zeros(request: Request) -> Operation:
    """Return the operation with which a joined rank takes part in a request."""
    zeros = request.zeros
    if zeros is None:
        raise ValueError(f"a joined rank cannot contribute zeros to {request}")
    if any(device != "cpu" for device in zeros.devices):
        return _ZerosOnDevice(request, zeros)
    return _answer(request, zeros, [_on_host(count, dtype) for count, dtype in zeros.buffers])


class _ZerosOnDevice(Operation):
    """An operation with zeros on a device, which the engine chooses."""

    def __init__(self, request: Request, zeros: Zeros) -> None:
        super().__init__()
        self.request, self._zeros = request, zeros

    def execute(self, communicator: Communicator) -> object:
        kinds = zip(self._zeros.buffers, self._zeros.devices, strict=True)
        buffers = [
            _on_host(count, dtype)
            if device == "cpu"
            else _on_device(communicator, count, dtype, device)
            for (count, dtype), device in kinds
        ]
        return _answer(self.request, self._zeros, buffers).execute(communicator)


def _answer(request: Request, zeros: Zeros, buffers: Sequence[Buffer]) -> Operation:
    from hvdtrain.core.gradients.plan import STEP
    from hvdtrain.core.gradients.step import GradientStep
    from hvdtrain.core.gradients.step_info import OwnStep

    if request.operation == STEP:
        *buckets, numbers = buffers
        step = GradientStep(buckets, numbers, _exchange(zeros))
        step.launch(None)
        return step.submitted_with(request, OwnStep(joined=True))
    from hvdtrain.core.allreduce import Allreduce

    shapes = [(buffer.count,) for buffer in buffers]
    return Allreduce(buffers, shapes, zeros.op, request.name, zeros.prescale, zeros.postscale)


def _exchange(zeros: Zeros) -> Exchange:
    """Return the exchange of a step of the other ranks."""
    if zeros.op is ReduceOp.ADASUM:
        from hvdtrain.core.exchanges.adasum import AdasumExchange

        return AdasumExchange()
    if zeros.half:
        from hvdtrain.core.exchanges.half import HalfExchange

        return HalfExchange.answering(zeros)
    from hvdtrain.core.gradients.exchange import AllreduceExchange

    return AllreduceExchange.answering(zeros)


def _on_host(count: int, dtype: DType) -> Buffer:
    return Buffer.of(np.zeros(count, dtype.numpy), dtype)


def _on_device(communicator: Communicator, count: int, dtype: DType, device: str) -> Buffer:
    memory = Buffer.of(communicator.empty(count * dtype.itemsize, device)).view(dtype)
    memory.zero()
    return memory


# The number of the world in which a follower was added, the members of its process set as a text,
# which ranks send to each other, and its number among the followers with the same members.
Key = tuple[int, str, int]
# The number of steps, and the state after them.
Taken = tuple[int, object]


class Follower(Protocol):
    """An object with the same state on the ranks of a process set, which take steps together."""

    steps: int  # that are complete

    def interrupt(self) -> None:
        """Drop what belongs to a step that was broken off."""

    def state(self) -> object:
        """Return a picklable copy of the state after the last step."""

    def take(self, state: object) -> None:
        """Take over the state of another rank that has completed one more step."""


class Followers:
    """The followers of this rank, while the program refers to them."""

    def __init__(self) -> None:
        self._followers: WeakValueDictionary[Key, Follower] = WeakValueDictionary()
        self._counts: Counter[str] = Counter()
        self.world = 0  # the number of those before this one

    def add(self, follower: Follower, ranks: Sequence[int]) -> None:
        """Add a follower (in the same order on all ranks of its process set)."""
        members = format_ranks(ranks, most=len(ranks))
        self._counts[members] += 1
        self._followers[self.world, members, self._counts[members]] = follower

    def clear(self) -> None:
        """Forget all (on all ranks): the program makes others in the next world."""
        self._followers.clear()

    def interrupt(self) -> None:
        """Interrupt all, before ranks get other numbers."""
        for follower in list(self._followers.values()):
            follower.interrupt()

    @collective
    def compare(self, communicator: Communicator) -> Mapping[Key, Taken]:
        """Return the states that followers of this rank lack, for `catch_up`.

        A rank may have completed a step that was broken off on another one.
        """
        followers = dict(self._followers)
        own = {key: follower.steps for key, follower in followers.items()}
        steps = communicator.gather_objects(own)
        sources = dict[Key, int]()
        for key in sorted(set().union(*steps)):
            taken = [theirs.get(key, -1) for theirs in steps]
            most = max(taken)
            if any(0 <= count < most for count in taken):
                sources[key] = taken.index(most)
        if not sources:
            return {}
        sent = {
            key: (own[key], follower.state())
            for key, follower in followers.items()
            if sources.get(key) == communicator.rank
        }
        received: dict[Key, Taken] = {}
        for states in communicator.gather_objects(sent):
            received.update(states)
        return {
            key: (count, state)
            for key, (count, state) in received.items()
            if own.get(key, count) < count
        }

    def catch_up(self, states: Mapping[Key, Taken]) -> None:
        """Take over the states that `compare` has returned, in a world of other ranks."""
        for key, (steps, state) in states.items():
            follower = self._followers.get(key)
            if follower is not None:
                follower.take(state)
                follower.steps = steps
        self.world += 1
        self._counts.clear()


_PERIOD_SECONDS = 0.1


class FailureWatch:
    """Lets all ranks notice one that has ended, also if this rank waits for none."""

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hvdtrain-failures", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopping.wait(_PERIOD_SECONDS):
            try:
                self._failures.check()
            except RanksLostError:
                self._failures.revoke()  # which ends all calls that wait for others
                return


@dataclass
class Context:
    """The world of this process."""

    config: Config
    engine_name: str
    library: str
    topology: Topology
    world: Channel
    failed: Callable[[str], None]
    ordered: bool = False
    failures: Failures | None = None
    recording: Recording | None = None
    flight: FlightRecord | None = None
    job: int = 0  # the time when it began; the same on all ranks
    process_id: int = field(default_factory=os.getpid)
    process_sets: dict[int, list[int]] = field(default_factory=dict)
    emptied: dict[int, list[int]] = field(default_factory=dict)
    vacancies: tuple[str, ...] = ()
    newcomer: bool = False
    accepts: bool = False
    recruiter: Recruiter | None = None
    process_set_channels: dict[int | None, Channel] = field(default_factory=dict)
    watch: StallWatch | None = None
    failure_watch: FailureWatch | None = None
    bucket_sizes: WeakKeyDictionary[Channel, BucketSize] = field(default_factory=WeakKeyDictionary)
    first_use: FirstUse = field(default_factory=FirstUse)
    buckets: str = ""
    kept: WeakKeyDictionary[Channel, dict[object, Any]] = field(default_factory=WeakKeyDictionary)
    followers: Followers = field(default_factory=Followers)
    keeps_states: bool = False
    changed: bool = False
    switch_interval: float = field(default_factory=shorten_switch_interval)
    _channels: list[Channel] = field(default_factory=list)
    _recorders: dict[Channel, Recorder] = field(default_factory=dict)
    _made: Counter[tuple[int, ...]] = field(default_factory=Counter)

    @collective
    def __post_init__(self) -> None:
        self.process_set_channels[0] = self.world
        self.next_number(self.world)

    @property
    def blocked(self) -> Stopwatch:
        """The time that this rank's program has waited for others."""
        return self.world.blocked

    @collective
    def open_channel(
        self, ranks: Sequence[int], label: str, parent: Channel | None = None
    ) -> Channel | None:
        """Open a channel for `ranks` (collective over `parent`); return None on other ranks."""
        whole = parent or self.world
        communicator: Communicator | None = whole.run(split(ranks))
        if communicator is None:
            return None
        members = [whole.ranks[rank] for rank in ranks]
        channel = make_channel(
            communicator, members, self.topology, label, self.failed, self.failures
        )
        channel.parent, channel.blocked = parent, self.blocked
        channel.number = self.next_number(channel) - 1
        self._track(channel)
        self._channels.append(channel)
        return channel

    @collective
    def next_number(self, channel: Channel) -> int:
        """Return the next number for an object of these members (collective over them)."""
        members = tuple(channel.ranks)
        self._made[members] += 1
        return self._made[members]

    @collective
    def close_channel(self, channel: Channel) -> None:
        channel.wait(channel.leave())
        self._channels.remove(channel)
        self._recorders.pop(channel, None)
        channel.close()

    def channels(self) -> list[Channel]:
        """Return all open channels of this rank, with the world's channel last."""
        return [*self._channels, self.world]

    def record(self, recording: Recording | None) -> None:
        """Start a recording of all channels, or end it with None."""
        before, self.recording = self.recording, recording
        for channel in (self.world, *self._channels):
            self._track(channel)
        if recording is not None:
            recording.follow(self.blocked)
        if before is not None:
            before.finish()

    def _track(self, channel: Channel) -> None:
        recorder = self._recorders.pop(channel, None)
        history = None if recorder is None else recorder.history
        history = history or self._history(channel)
        recorder = None
        if self.recording is not None:
            process_set = channel.parent or channel
            recorder = self.recording.recorder(channel.label, process_set.label, history)
        elif history is not None:
            from hvdtrain.core.timeline.recorder import Recorder

            recorder = Recorder(None, False, history)
        if recorder is not None:
            self._recorders[channel] = recorder
        channel.queue.timed, channel.queue.track = self.recording is not None, recorder

    def keep_flight_record(self, folder: str) -> None:
        """Begin a flight record in a folder (local), or go on with the one that was asked for."""
        from hvdtrain.core.timeline.flight import open_flight_record

        if self.flight is not None and self.config.flight_record:
            return
        self.end_flight_record()
        self.flight = open_flight_record(folder, self.topology, self.engine_name, self.job)
        for channel in self.channels() if self.flight is not None else ():
            if channel in self._recorders:
                self._recorders[channel].history = self._history(channel)
            else:
                self._track(channel)

    def end_flight_record(self) -> None:
        """Remove the flight record, unless an error of a rank of the node is in it (local)."""
        record, self.flight = self.flight, None
        if record is None:
            return
        for recorder in self._recorders.values():
            recorder.history = None
        if self.recording is None:
            for channel in self.channels():
                self._track(channel)
        record.close()

    def _history(self, channel: Channel) -> History | None:
        if self.flight is None:
            return None
        return self.flight.history(channel.ranks, channel.number, channel.label)

    def pending(self) -> list[Wait]:
        """Return the pending operations of this rank, as it does about once a second."""
        if self.flight is not None:
            self.flight.beat()
        from hvdtrain.core.stall import pending_on

        return pending_on(self.channels(), self.blocked)

    def save_records(self, stall: str = "") -> None:
        """Save what was recorded of this rank, which waits, or may be about to end."""
        if self.flight is not None and stall:
            self.flight.note("stall", stall)
        if self.recording is not None:
            self.recording.save()

    @collective
    def leave(self) -> None:
        """Leave the world together with all ranks, and close the engine.

        The request to leave is submitted on every channel at once, so that a rank which waits for
        this one on any of them gets an error.
        """
        if self.recruiter is not None:
            self.recruiter.stop()
        channels = self.channels()
        markers = [channel.leave() for channel in channels]
        poll_until(lambda: _all_done(channels, markers))
        if self.failure_watch is not None:
            self.failure_watch.stop()
        if self.watch is not None:
            self.watch.stop()
        recording = self.recording
        self.record(None)
        if recording is not None:
            recording.write_or_warn(self.world.communicator, self.topology.hostnames)
        if self.failures is not None:
            self.failures.agree(True)  # a rank that ends before would seem to be lost
        for channel in channels:
            channel.close()
        self.end_flight_record()
        restore_switch_interval(self.switch_interval)

    def abandon(self, error: RanksLostError) -> None:
        """Leave the world without the ranks that are lost: pending operations fail everywhere."""
        assert self.failures is not None
        self.failures.revoke()
        if self.failure_watch is not None:
            self.failure_watch.stop()
        if self.watch is not None:
            self.watch.abandon()
        for channel in self.channels():
            channel.abandon(error)
        self.end_flight_record()
        self.followers.interrupt()


def make_channel(
    communicator: Communicator,
    ranks: Sequence[int],
    topology: Topology,
    label: str,
    failed: Callable[[str], None],
    failures: Failures | None,
) -> Channel:
    lost = None if failures is None else failures.revoke
    title = topology.title
    channel = Channel(communicator, ranks, title, answer_with_zeros, label, failed, lost)
    channel.before_closing(KNOWN_CALLS.clear)  # which would keep its memory
    return channel


def _all_done(channels: list[Channel], markers: list[Operation]) -> bool:
    """Return whether all markers are done; raise the error of one that failed."""
    done = [channel.poll(marker) for channel, marker in zip(channels, markers, strict=True)]
    for marker in markers:
        if marker.done:
            marker.outcome()
    return all(done)


@collective
def open_context(
    config: Config,
    world: EngineWorld,
    ordered: bool,
    failed: Callable[[str], None],
) -> Context:
    """Open the channel of a world."""
    communicator, failures = world.communicator, world.failures
    topology = Topology.from_nodes(communicator.rank, world.nodes, world.hostnames)
    # Ranks on other hosts may not have the first one's environment.
    own = [ordered, config.min_ranks, config.max_ranks, time.time_ns()]
    settings = np.array(own, np.uint64)
    communicator.start_max(settings).wait()
    in_order, least, most, job = settings.tolist()
    config = replace(config, min_ranks=least, max_ranks=most)
    chosen = communicator
    if in_order:
        from hvdtrain.core.ordered import OrderedCommunicator

        chosen = OrderedCommunicator(communicator)
    channel = make_channel(chosen, range(topology.size), topology, "world", failed, failures)
    here = Context(
        config, world.engine, world.library, topology, channel, failed, bool(in_order), failures
    )
    here.job = job
    if config.flight_record:
        here.keep_flight_record(config.flight_record)
    return here


@collective
def start_watches(here: Context, communicator: Communicator, abort: Callable[[int], None]) -> None:
    """Start the watches of a world whose channel is not in use yet."""
    if here.failures is not None and here.topology.size > 1:
        here.failure_watch = FailureWatch(here.failures)
    if communicator.size == 1:
        return
    from hvdtrain.core.stall import watch_stalls

    here.watch = watch_stalls(
        communicator,
        here.config,
        here.topology,
        here.pending,
        abort,
        here.save_records,
    )
