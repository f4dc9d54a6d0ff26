"""The one piece of global state: the world this process has joined."""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from hvdtrain.config import Config
from hvdtrain.core.channel import LEAVE, Channel, Round, wait_patiently
from hvdtrain.core.exits import ExitGuard, speak_plainly
from hvdtrain.core.stopwatch import Stopwatch
from hvdtrain.engines.communicator import EngineWorld
from hvdtrain.engines.registry import choose_engine, open_world
from hvdtrain.errors import (
    HvdtrainError,
    LauncherMismatchError,
    NotInitializedError,
    PeerFailureError,
)
from hvdtrain.topology import Topology
from hvdtrain.world import promised_world

__all__ = ["Context", "current", "init", "is_initialized", "shutdown"]

# How long a rank with an unfinished step waits for its peers to leave as well.
_OWING_LIMIT_SECONDS = 2.0
# How much earlier than the others the promised rank 0 says that there is no world.
_SPOKESMAN_SECONDS = 5.0


@dataclass
class Context:
    """The world of this process.

    Attributes:
        config: the settings of the environment.
        engine_name: which engine moves the bytes.
        library: name, version and file of the library beneath it.
        topology: the place of this rank.
        world: the channel of all ranks, for free-standing operations.
        blocked: how long the training thread has been blocked on communication.
        process_id: the process that joined; a forked child has not.
    """

    config: Config
    engine_name: str
    library: str
    topology: Topology
    world: Channel
    blocked: Stopwatch = field(default_factory=Stopwatch)
    process_id: int = field(default_factory=os.getpid)
    _channels: list[Channel] = field(default_factory=list)

    def open_channel(self, ranks: Sequence[int]) -> Channel | None:
        """Make a channel of its own for `ranks` (collective over the world); None elsewhere."""
        communicator = self.world.communicator.split(ranks)
        if communicator is None:
            return None
        channel = Channel(communicator)
        self._channels.append(channel)
        return channel

    def leave(self) -> None:
        """Agree with all ranks that everybody leaves, and give the engine back (collective).

        The wish to leave goes out on every channel at once, so that a rank which still waits
        for this one on any of them finds out.

        Raises:
            PeerFailureError: other ranks wait for this one and are not about to leave.
        """
        channels = [*self._channels, self.world]
        owing = [channel.unfinished for channel in channels if channel.unfinished]
        waiting = [Round(channel, LEAVE) for channel in channels if not channel.unfinished]

        def all_left() -> bool:
            for proposal in [p for p in waiting if p.test()]:
                proposal.settle()
                waiting.remove(proposal)
            return not waiting

        # Peers may sit in the middle of what this rank has not finished, where no message
        # reaches them: if they do not leave too, they never will.
        if not wait_patiently(all_left, _OWING_LIMIT_SECONDS if owing else math.inf):
            raise PeerFailureError(
                f"{self.topology.title} left the job in the middle of {owing[0]} while others "
                "wait for it"
            )
        for channel in channels:
            channel.communicator.close()


_context: Context | None = None
_guard: ExitGuard | None = None


def init(engine: str | None = None) -> None:
    """Join the world of ranks that the launcher started (collective). A second call does nothing.

    Args:
        engine: "auto", "mpi" or "local"; None takes HVDTRAIN_ENGINE, or auto.

    Raises:
        UsageError: an unknown engine, or a setting that makes no sense.
        EngineUnavailableError: the engine's library is not installed.
        LauncherMismatchError: the world is not what the launcher promised.
        HvdtrainError: called in a child process of multiprocessing, which is no rank.
    """
    global _context, _guard
    if is_initialized():
        return
    if _is_child_process():
        raise HvdtrainError(
            "init() in a multiprocessing child, which is not a rank of its own: put the code "
            "that calls init() under `if __name__ == '__main__':`"
        )
    try:
        config = Config.from_environ(os.environ)
        world = open_world(choose_engine(engine or config.engine, os.environ), config, os.environ)
        _check_promise(world)
    except HvdtrainError as error:
        speak_plainly(silent=_hold_back(error))
        raise
    topology = Topology.from_nodes(world.communicator.rank, world.nodes, world.hostnames)
    _context = Context(config, world.engine, world.library, topology, Channel(world.communicator))
    _guard = ExitGuard(topology, shutdown, world.communicator.abort)
    _guard.install()


def _is_child_process() -> bool:
    # A spawned child imports the main script before it knows its parent; until then it is marked.
    inheriting = getattr(multiprocessing.current_process(), "_inheriting", False)
    return inheriting or multiprocessing.parent_process() is not None


def _hold_back(error: HvdtrainError) -> bool:
    """Let the promised rank 0 speak for ranks that have no world to agree in; tell who is mute."""
    promised = promised_world(os.environ)
    mute = isinstance(error, LauncherMismatchError) and promised is not None and promised.rank > 0
    if mute:
        time.sleep(_SPOKESMAN_SECONDS)  # a launcher may end all ranks when the first one exits
    return mute


def _check_promise(world: EngineWorld) -> None:
    promised = promised_world(os.environ)
    size = world.communicator.size
    if promised is None or promised.size == size:
        return
    raise LauncherMismatchError(
        f"{promised.launcher} promised {promised.size} ranks "
        f"({promised.variable}={promised.size}), but engine {world.engine} with "
        f"{world.library} formed a world of {size}: they do not belong together. Start the "
        "ranks with the mpirun of the MPI that is loaded"
    )


def shutdown() -> None:
    """Leave the world together with all other ranks (collective). A second call does nothing."""
    global _context
    if is_initialized():
        current().leave()
        _context = None
        if _guard is not None:
            _guard.uninstall()


def is_initialized() -> bool:
    """Tell whether this process has joined a world and not left it (local)."""
    return _context is not None and _context.process_id == os.getpid()


def current() -> Context:
    """Return the context (local).

    Raises:
        NotInitializedError: before init(), after shutdown(), or in a forked child.
    """
    if _context is None:
        raise NotInitializedError("hvdtrain is not initialized: call init() first")
    if _context.process_id != os.getpid():
        raise NotInitializedError("this is a forked child process, which is not a rank")
    return _context
