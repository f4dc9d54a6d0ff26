"""The world that this process has joined, with its channels."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from hvdtrain.collective import collective
from hvdtrain.config import Config
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.agreement.first_use import FirstUse
from hvdtrain.core.agreement.operation import Operation
from hvdtrain.core.collectives.split import Split
from hvdtrain.core.gradients.bucket_size import BucketSize
from hvdtrain.core.membership.failure_watch import FailureWatch
from hvdtrain.core.membership.followers import Followers
from hvdtrain.core.membership.joined import answer_with_zeros
from hvdtrain.core.membership.recruiter import Recruiter
from hvdtrain.core.process.switching import restore_switch_interval, shorten_switch_interval
from hvdtrain.core.stall.watch import StallWatch
from hvdtrain.core.timeline.recording import Recording
from hvdtrain.core.timeline.start_stop import write_timeline_or_warn
from hvdtrain.core.timeline.stopwatch import Stopwatch
from hvdtrain.engines.communicator import Communicator, Failures
from hvdtrain.errors import RanksLostError
from hvdtrain.polling import poll_until
from hvdtrain.topology import Topology


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
    blocked: Stopwatch = field(default_factory=Stopwatch)
    recording: Recording | None = None
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
    plans: dict[Hashable, Any] = field(default_factory=dict)
    followers: Followers = field(default_factory=Followers)
    keeps_states: bool = False
    changed: bool = False
    switch_interval: float = field(default_factory=shorten_switch_interval)
    _channels: list[Channel] = field(default_factory=list)
    _made: Counter[tuple[int, ...]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.process_set_channels[0] = self.world
        self.next_number(self.world)

    @collective
    def open_channel(
        self, ranks: Sequence[int], label: str, parent: Channel | None = None
    ) -> Channel | None:
        """Open a channel for `ranks` (collective over `parent`); return None on other ranks."""
        whole = parent or self.world
        communicator: Communicator | None = whole.run(Split(ranks))
        if communicator is None:
            return None
        members = [whole.ranks[rank] for rank in ranks]
        channel = make_channel(
            communicator, members, self.topology, label, self.failed, self.failures
        )
        channel.parent = parent
        self._track(channel)
        channel.number = self.next_number(channel) - 1
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
        """Close a channel (collective over its members)."""
        channel.wait(channel.leave())
        self.plans.clear()  # those of this channel would keep its memory
        self._channels.remove(channel)
        channel.close()

    def channels(self) -> list[Channel]:
        """Return all open channels of this rank, with the world's channel last."""
        return [*self._channels, self.world]

    def record(self, recording: Recording | None) -> None:
        """Start a recording of all channels, or end it with None."""
        before, self.recording = self.recording, recording
        for channel in (self.world, *self._channels):
            channel.track = None
            self._track(channel)
        if recording is not None:
            recording.follow(self.blocked)
        if before is not None:
            before.finish()

    def _track(self, channel: Channel) -> None:
        if self.recording is not None:
            process_set = channel.parent or channel
            channel.track = self.recording.track(channel.label, process_set.label)

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
            write_timeline_or_warn(self.world.communicator, recording, self.topology.hostnames)
        if self.failures is not None:
            self.failures.agree(True)  # a rank that ends before would seem to be lost
        for channel in channels:
            channel.close()
        restore_switch_interval(self.switch_interval)

    def abandon(self, error: RanksLostError) -> None:
        """Leave the world without the ranks that are lost, and close the engine.

        Pending operations fail; those that run on other ranks fail there as well.
        """
        assert self.failures is not None
        self.failures.revoke()
        if self.failure_watch is not None:
            self.failure_watch.stop()
        if self.watch is not None:
            self.watch.abandon()
        for channel in self.channels():
            channel.abandon(error)
        self.plans.clear()
        self.followers.interrupt()


def make_channel(
    communicator: Communicator,
    ranks: Sequence[int],
    topology: Topology,
    label: str,
    failed: Callable[[str], None],
    failures: Failures | None,
) -> Channel:
    """Return a channel of a world."""
    lost = None if failures is None else failures.revoke
    return Channel(communicator, ranks, topology.title, answer_with_zeros, label, failed, lost)


def _all_done(channels: list[Channel], markers: list[Operation]) -> bool:
    """Return whether all markers are done; raise the error of one that failed."""
    done = [channel.poll(marker) for channel, marker in zip(channels, markers, strict=True)]
    for marker in markers:
        if marker.done:
            marker.outcome()
    return all(done)
