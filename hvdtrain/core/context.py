"""The context: the world that this process has joined, the only global state."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

from hvdtrain.arithmetic import in_default_arithmetic
from hvdtrain.collective import collective
from hvdtrain.config import Config
from hvdtrain.core.membership.opening import open_context, start_watches
from hvdtrain.core.membership.recovery import Recovery, open_next, open_of_newcomer, recruit
from hvdtrain.core.membership.world import Context
from hvdtrain.core.process.exits import ExitGuard, install_plain_excepthook
from hvdtrain.core.process.malloc import keep_freed_memory
from hvdtrain.core.process.output import flush_output
from hvdtrain.core.startup_checks import (
    check_world_size,
    delay_startup_error,
    is_child_process,
    warn_of_binding,
    warn_of_idle_tasks,
)
from hvdtrain.core.timeline.start_stop import begin_from_environment
from hvdtrain.engines.communicator import Communicator
from hvdtrain.engines.registry import open_engine
from hvdtrain.errors import ExcludedError, HvdtrainError, NotInitializedError, UnsupportedError
from hvdtrain.milestones import ENDED, STARTED, finish_init, report
from hvdtrain.topology import Topology

__all__ = [
    "Context",
    "Recovery",
    "accept_newcomers",
    "alone_if_newcomer",
    "current",
    "end_alone",
    "init",
    "is_initialized",
    "newcomer_waits",
    "recover",
    "shutdown",
]


def _end_soon(reason: str) -> None:
    """End the job, unless the program ends by itself."""
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


@collective
def init(engine: str | None = None, deterministic: bool = False) -> None:
    """Join the world of ranks that the launcher started. A second call does nothing."""
    global _context
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
        open_world = in_default_arithmetic(open_engine)
        world = open_world(engine or config.engine, config, os.environ)
        check_world_size(world)
        host = world.hostnames[world.communicator.rank]
        recording = None
        if not world.joined:
            recording = begin_from_environment(config, world.communicator, host)
    except Exception as error:
        install_plain_excepthook(
            silent=isinstance(error, HvdtrainError) and delay_startup_error(error)
        )
        raise
    topology = Topology.from_nodes(world.communicator.rank, world.nodes, world.hostnames)
    _guard_exits(config, topology, world.communicator)
    try:
        if topology.size > 1:
            keep_freed_memory(os.environ)
        ordered = config.deterministic or deterministic
        if world.joined:
            _context = open_of_newcomer(config, world, ordered, _end_soon, _abort)
            _guard_exits(config, _context.topology, _context.world.communicator)
            finish_init(os.environ)
            return
        warn_of_binding(world, topology)
        warn_of_idle_tasks(topology)
        _context = open_context(config, world, ordered, _end_soon)
        _context.record(recording)
        start_watches(_context, world.communicator, partial(_abort, world.communicator))
    except ExcludedError as error:
        _end_excluded(error)
    except Exception as error:  # other ranks may be blocked in an engine call for ever
        assert _guard is not None
        _guard.fail(error)
        raise
    finish_init(os.environ)
    _report_start(topology)


def _report_start(topology: Topology) -> None:
    if topology.rank == 0:
        report(STARTED, os.environ)


def _guard_exits(config: Config, topology: Topology, communicator: Communicator) -> None:
    """Have every exit of this rank pass through a guard."""
    global _guard
    if _guard is not None:
        _guard.uninstall()
    abort, any_thread = partial(_abort, communicator), config.abort_on_thread_exception
    _guard = ExitGuard(topology, shutdown, abort, any_thread)
    _guard.install()


@collective
def recover(leaving: Collection[int] = ()) -> Recovery:
    """Go on without the ranks that have ended (collective over those that are left).

    Call it when an operation has raised RanksLostError, or on all ranks, after `failures.agree`,
    when rank 0's `newcomer_waits` says that another rank can join. Afterwards ranks have new
    numbers, in the same order, and there are no pending operations. Process sets and wrapped
    optimizers that exist go on in the new world; gradients of an interrupted step are dropped.
    A rank whose connections were closed, so that others went on without it, ends here.
    """
    global _context
    before = current()
    if before.failures is None:
        raise UnsupportedError(
            f"{before.topology.title} recover: engine {before.engine_name} cannot go on without "
            "ranks that have ended: use engine mpi with Open MPI 5, under mpirun --with-ft ulfm"
        )
    try:
        _context, recovery = open_next(before, before.failures, _abort, leaving)
    except ExcludedError as error:
        _end_excluded(error)
    except Exception as error:  # other ranks may be blocked in an engine call for ever
        assert _guard is not None
        _guard.fail(error)
        raise
    _guard_exits(before.config, _context.topology, _context.world.communicator)
    _report_start(_context.topology)  # the first rank may have ended before it could
    return recovery


@contextmanager
def alone_if_newcomer() -> Iterator[None]:
    """Let a rank that has joined prepare what the others have, in a world of its own.

    What is made there is made anew in the world of all with its next use, as after `recover`. It
    does nothing on other ranks, and after `accept_newcomers`.
    """
    global _context
    here = current()
    if not here.newcomer:
        yield
        return
    world = open_engine("local", here.config, os.environ)
    _context = open_context(here.config, world, here.ordered, here.failed)
    try:
        yield
    finally:
        _context = here


def accept_newcomers() -> None:
    """Say that the program takes in ranks that join, by `recover` (on all ranks).

    Rank 0 then starts others, if HVDTRAIN_MAX_RANKS asks for it. A rank that has joined calls it
    when it is to do from now on what the others do.
    """
    here = current()
    here.newcomer = False
    if not here.accepts:
        here.accepts = True
        recruit(here)


def newcomer_waits() -> bool:
    """Return whether another rank can join by `recover` (local; False on all but rank 0)."""
    recruiter = current().recruiter
    return recruiter is not None and recruiter.waits


def _abort(communicator: Communicator, code: int) -> None:
    """End all ranks with an exit code, without waiting, and save the recording."""
    try:
        if _context is not None and _context.recording is not None:
            _context.recording.save()
    finally:
        communicator.abort(code)


def _end_excluded(error: ExcludedError) -> NoReturn:
    print(error, file=sys.stderr, flush=True)
    end_alone()


def end_alone() -> NoReturn:
    """End this process with exit code 0, while the others go on as if it had been killed.

    MPI is not finalized: that would wait for the others.
    """
    try:
        if _context is not None and _context.recording is not None:
            _context.recording.save()
    finally:
        flush_output()
        os._exit(0)


@collective
def shutdown() -> None:
    """Leave the world together with all other ranks (collective). A second call does nothing."""
    global _context
    if is_initialized():
        topology = current().topology
        current().leave()
        _context = None
        if topology.local_rank == 0:
            report(ENDED, os.environ)
        if _guard is not None:
            _guard.uninstall()


def is_initialized() -> bool:
    """Return whether this process has joined a world and not left it (local)."""
    return _context is not None and _context.process_id == _process_id


def current() -> Context:
    """Return the context."""
    if _context is None:
        raise NotInitializedError("hvdtrain is not initialized: call init() first")
    if _context.process_id != _process_id:
        raise NotInitializedError("this is a forked child process, which is not a rank")
    return _context
