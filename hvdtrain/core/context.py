"""The context: the world that this process has joined, the only global state."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from hvdtrain.arithmetic import in_default_arithmetic
from hvdtrain.config import Config
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.agreement.first_use import FirstUse
from hvdtrain.core.agreement.operation import Operation
from hvdtrain.core.collectives.ordered import OrderedCommunicator
from hvdtrain.core.collectives.split import Split
from hvdtrain.core.gradients.bucket_size import BucketSize
from hvdtrain.core.joined import answer_with_zeros
from hvdtrain.core.process.exits import ExitGuard, install_plain_excepthook
from hvdtrain.core.process.malloc import keep_freed_memory
from hvdtrain.core.process.switching import restore_switch_interval, shorten_switch_interval
from hvdtrain.core.stall.watch import StallWatch, pending_on, watch_stalls
from hvdtrain.core.startup_checks import (
    check_world_size,
    delay_startup_error,
    is_child_process,
    warn_of_binding,
    warn_of_idle_tasks,
)
from hvdtrain.core.timeline.recording import Recording
from hvdtrain.core.timeline.start_stop import begin_from_environment, write_timeline_or_warn
from hvdtrain.core.timeline.stopwatch import Stopwatch
from hvdtrain.engines.communicator import Communicator, EngineWorld
from hvdtrain.engines.registry import open_engine
from hvdtrain.errors import (
    HvdtrainError,
    NotInitializedError,
)
from hvdtrain.polling import poll_until
from hvdtrain.topology import Topology

__all__ = ["Context", "current", "init", "is_initialized", "shutdown"]


@dataclass
class Context:
    """The world of this process.

    Attributes:
        config: settings from the environment.
        engine_name: name of the engine.
        library: name, version and file of the engine's library.
        topology: place of this rank.
        world: channel of all ranks, for named operations.
        blocked: stopwatch of the time that the program was blocked on communication.
        recording: recording of the timeline, if one is on.
        process_id: process that joined the world; a forked child has another one.
        process_sets: ranks of each process set except the global one, by its number.
        process_set_channels: channels of the process sets of this rank, by number; 0 is the world.
        watch: stall watch; None if it is off.
        bucket_sizes: maximum bucket size of each channel whose ranks have agreed on one.
        first_use: agreements that are made on first use.
        buckets: description of the last bucket plan, for users.
        kept: objects that adapters keep for the lifetime of a channel, by keys of their own.
        plans: operations that adapters have prepared, by keys of their own.
        switch_interval: Python's thread switch interval before init().
    """

    config: Config
    engine_name: str
    library: str
    topology: Topology
    world: Channel
    blocked: Stopwatch = field(default_factory=Stopwatch)
    recording: Recording | None = None
    process_id: int = field(default_factory=os.getpid)
    process_sets: dict[int, list[int]] = field(default_factory=dict)
    process_set_channels: dict[int | None, Channel] = field(default_factory=dict)
    watch: StallWatch | None = None
    bucket_sizes: WeakKeyDictionary[Channel, BucketSize] = field(default_factory=WeakKeyDictionary)
    first_use: FirstUse = field(default_factory=FirstUse)
    buckets: str = ""
    kept: WeakKeyDictionary[Channel, dict[object, Any]] = field(default_factory=WeakKeyDictionary)
    plans: dict[Hashable, Any] = field(default_factory=dict)
    switch_interval: float = field(default_factory=shorten_switch_interval)
    _channels: list[Channel] = field(default_factory=list)
    _made: Counter[tuple[int, ...]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.process_set_channels[0] = self.world
        self.next_number(self.world)

    def open_channel(
        self, ranks: Sequence[int], label: str, parent: Channel | None = None
    ) -> Channel | None:
        """Open a channel for `ranks` (collective over `parent`); return None on other ranks.

        Args:
            ranks: members, as numbered in `parent`.
            label: name in a timeline.
            parent: channel with the same members from which it is opened; by default the
                world's channel.
        """
        whole = parent or self.world
        communicator: Communicator | None = whole.run(Split(ranks))
        if communicator is None:
            return None
        members = [whole.ranks[rank] for rank in ranks]
        channel = Channel(
            communicator, members, self.topology.title, answer_with_zeros, label, _end_soon
        )
        channel.parent = parent
        self._track(channel)
        channel.number = self.next_number(channel) - 1
        self._channels.append(channel)
        return channel

    def next_number(self, channel: Channel) -> int:
        """Return the next number for an object of these members (collective over them)."""
        members = tuple(channel.ranks)
        self._made[members] += 1
        return self._made[members]

    def close_channel(self, channel: Channel) -> None:
        """Close a channel (collective over its members)."""
        channel.wait(channel.leave())
        self.plans.clear()  # those of this channel would keep its memory
        self._channels.remove(channel)
        channel.close()

    def channels(self) -> list[Channel]:
        """Return all open channels of this rank, with the world's channel last (local)."""
        return [*self._channels, self.world]

    def record(self, recording: Recording | None) -> None:
        """Start a recording of all channels, or end it with None (local)."""
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

    def leave(self) -> None:
        """Leave the world together with all ranks, and close the engine (collective).

        The request to leave is submitted on every channel at once, so that a rank which waits for
        this one on any of them gets an error.

        Raises:
            PeerFailureError: other ranks wait for this one and do not leave.
        """
        channels = self.channels()
        markers = [channel.leave() for channel in channels]
        poll_until(lambda: _all_done(channels, markers))
        if self.watch is not None:
            self.watch.stop()
        recording = self.recording
        self.record(None)
        if recording is not None:
            write_timeline_or_warn(self.world.communicator, recording, self.topology.hostnames)
        for channel in channels:
            channel.close()
        restore_switch_interval(self.switch_interval)


def _all_done(channels: list[Channel], markers: list[Operation]) -> bool:
    """Return whether all markers are done; raise the error of one that failed."""
    done = [channel.poll(marker) for channel, marker in zip(channels, markers, strict=True)]
    for marker in markers:
        if marker.done:
            marker.outcome()
    return all(done)


def _end_soon(reason: str) -> None:
    """End the job, unless the program ends by itself (local)."""
    if _guard is not None:
        _guard.end_soon(reason)


_context: Context | None = None
_guard: ExitGuard | None = None
# The number of this process: to ask the system for it takes longer than what asks for a context.
_process_id = os.getpid()


def _note_fork() -> None:
    global _process_id
    _process_id = os.getpid()


os.register_at_fork(after_in_child=_note_fork)


def init(engine: str | None = None, deterministic: bool = False) -> None:
    """Join the world of ranks that the launcher started (collective). A second call does nothing.

    Args:
        engine: "auto" or the name of an engine; None uses HVDTRAIN_ENGINE, or "auto".
        deterministic: whether to sum in a fixed order, even without HVDTRAIN_DETERMINISTIC.

    Raises:
        UsageError: the engine is unknown, a setting is invalid, or the timeline cannot be
            written.
        EngineUnavailableError: the library of the engine is not installed.
        LauncherMismatchError: the world does not have the size that the launcher promised.
        HvdtrainError: this is a child process of multiprocessing, which is not a rank.
    """
    global _guard
    if is_initialized():
        return
    if is_child_process():
        raise HvdtrainError(
            "init() in a multiprocessing child, which is not a rank of its own: put the code "
            "that calls init() under `if __name__ == '__main__':`"
        )
    try:
        config = Config.from_environ(os.environ)
        # Engines may do arithmetic in threads of their own.
        join = in_default_arithmetic(open_engine)
        world = join(engine or config.engine, config, os.environ)
        check_world_size(world)
        host = world.hostnames[world.communicator.rank]
        recording = begin_from_environment(config, world.communicator, host)
    except Exception as error:
        install_plain_excepthook(
            silent=isinstance(error, HvdtrainError) and delay_startup_error(error)
        )
        raise
    topology = Topology.from_nodes(world.communicator.rank, world.nodes, world.hostnames)
    any_thread = config.abort_on_thread_exception
    _guard = ExitGuard(topology, shutdown, partial(_abort, world.communicator), any_thread)
    _guard.install()
    try:
        _open(config, world, topology, recording, deterministic)
    except Exception as error:  # other ranks may be blocked in an engine call for ever
        _guard.fail(error)
        raise


def _open(
    config: Config,
    world: EngineWorld,
    topology: Topology,
    recording: Recording | None,
    deterministic: bool,
) -> None:
    """Create the context of a world that all ranks have joined (collective)."""
    global _context
    warn_of_binding(world, topology)
    warn_of_idle_tasks(topology)
    if topology.size > 1:
        keep_freed_memory(os.environ)
    communicator = world.communicator
    # Ranks on other hosts may not have the first one's environment.
    ordered = np.array([config.deterministic or deterministic], np.uint64)
    communicator.start_max(ordered).wait()
    if ordered[0]:
        communicator = OrderedCommunicator(communicator)
    channel = Channel(
        communicator, range(topology.size), topology.title, answer_with_zeros, "world", _end_soon
    )
    here = _context = Context(config, world.engine, world.library, topology, channel)
    here.record(recording)
    here.watch = watch_stalls(
        world.communicator,
        config,
        topology,
        lambda: pending_on(here.channels(), here.blocked),
        partial(_abort, world.communicator),
    )


def _abort(communicator: Communicator, code: int) -> None:
    """End all ranks with an exit code, without waiting, and save the recording (local)."""
    try:
        if _context is not None and _context.recording is not None:
            _context.recording.save()
    finally:
        communicator.abort(code)


def shutdown() -> None:
    """Leave the world together with all other ranks (collective). A second call does nothing."""
    global _context
    if is_initialized():
        current().leave()
        _context = None
        if _guard is not None:
            _guard.uninstall()


def is_initialized() -> bool:
    """Return whether this process has joined a world and not left it (local)."""
    return _context is not None and _context.process_id == _process_id


def current() -> Context:
    """Return the context (local).

    Raises:
        NotInitializedError: before init(), after shutdown(), or in a forked child.
    """
    if _context is None:
        raise NotInitializedError("hvdtrain is not initialized: call init() first")
    if _context.process_id != _process_id:
        raise NotInitializedError("this is a forked child process, which is not a rank")
    return _context
