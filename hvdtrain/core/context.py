"""The context: the world that this process has joined, the only global state."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from multiprocessing.context import ForkServerProcess
from typing import TYPE_CHECKING, Any, NoReturn

from hvdtrain.collective import collective
from hvdtrain.config import Config
from hvdtrain.core.agreement.channel import KNOWN_CALLS
from hvdtrain.core.exits import (
    ExitGuard,
    flush_output,
    install_plain_excepthook,
    write_message,
)
from hvdtrain.core.membership import Context, open_context, start_watches
from hvdtrain.core.tuning import in_default_arithmetic, keep_freed_memory
from hvdtrain.engines import open_engine
from hvdtrain.engines.communicator import Communicator, EngineWorld
from hvdtrain.errors import (
    ExcludedError,
    HostsUpdatedInterrupt,
    HvdtrainError,
    LauncherMismatchError,
    NotInitializedError,
    UnsupportedError,
    UsageError,
)
from hvdtrain.topology import RankCores, Topology, binding_warnings, count_threads
from hvdtrain.world import SRUN, SUPERVISOR, idle_tasks, promised_world

if TYPE_CHECKING:
    from hvdtrain.core.recovery import Recovery

# How long other ranks wait while the promised rank 0 reports that there is no world.
_REPORT_SECONDS = 5.0


def check_world_size(world: EngineWorld) -> None:
    promised = promised_world(os.environ)
    size = world.communicator.size
    if promised is None or promised.size == size or world.joined:
        return
    if world.failures is not None and size < promised.size:
        return  # ranks have ended since
    if world.engine == "local":
        raise UsageError(
            f"engine local is for one rank, but {promised.launcher} started {promised.size}: "
            "use engine mpi or auto"
        )
    by_srun = promised.launcher == SRUN
    instead = ", or name its way in: srun --mpi=pmix, or pmi2 for MPICH" if by_srun else ""
    raise LauncherMismatchError(
        f"{promised.launcher} promised {promised.size} ranks "
        f"({promised.variable}={promised.size}), but engine {world.engine} with "
        f"{world.library} formed a world of {size}: they do not belong together. Start the "
        f"ranks with the mpirun of the MPI that is loaded{instead}"
    )


def delay_startup_error(error: HvdtrainError) -> bool:
    """Wait while the promised rank 0 reports an error of all ranks; return at once on rank 0."""
    promised = promised_world(os.environ)
    if promised is None or promised.rank == 0:
        return False
    time.sleep(_REPORT_SECONDS)  # a launcher may end all ranks when the first one exits
    return isinstance(error, LauncherMismatchError | UsageError)  # which all ranks have


def warn_of_idle_tasks(topology: Topology) -> None:
    """Warn if the tasks of a Slurm job other than this rank do nothing."""
    if idle := idle_tasks(os.environ):
        write_message(
            topology.title,
            f"this job of Slurm has {idle + 1} tasks, and this is one rank alone: start all of "
            "them with srun, or with `python -m hvdtrain run`",
        )


@collective
def warn_of_binding(world: EngineWorld, topology: Topology) -> None:
    """Warn, on one rank of each node, of bad CPU binding."""
    cores = frozenset(os.sched_getaffinity(0))
    own = RankCores(topology.rank, cores, count_threads(os.environ, sys.modules))
    first = topology.local_rank == 0
    gathered = world.communicator.gather_objects(own, wanted=first)
    if first:
        node = world.nodes[topology.rank]
        ranks = [rank for rank in gathered if world.nodes[rank.rank] == node]
        there = os.cpu_count() or 1
        for text in binding_warnings(topology.hostnames[topology.rank], ranks, there):
            write_message(topology.title, text)


def _end_soon(reason: str) -> None:
    """End the job, unless the program ends by itself."""
    if _guard is not None:
        _guard.end_soon(reason)


_context: Context | None = None
_guard: ExitGuard | None = None
# The number of this process: to ask the system for it takes longer than what asks for a context.
_process_id = os.getpid()


_FOR_SERVER = "hvdtrain.fork_server"


def _note_fork() -> None:
    global _process_id
    _process_id = os.getpid()
    KNOWN_CALLS.clear()  # a child must ask for a context, and gets none


os.register_at_fork(after_in_child=_note_fork)


def _end_workers_with_this_rank() -> None:
    own = ForkServerProcess._Popen

    def preload_ours_too() -> None:
        from multiprocessing import forkserver  # few programs have such children

        preloaded = getattr(forkserver._forkserver, "_preload_modules", ["__main__"])
        if _FOR_SERVER not in preloaded:
            forkserver.set_forkserver_preload([*preloaded, _FOR_SERVER])

    def preload_and_start(process: Any) -> Any:
        preload_ours_too()  # the program may have set what is preloaded since
        return own(process)

    if own.__module__ != __name__:
        ForkServerProcess._Popen = staticmethod(preload_and_start)  # type: ignore[method-assign,assignment]
    if "multiprocessing.forkserver" in sys.modules:  # a program that starts the server itself
        preload_ours_too()


@collective
def init(engine: str | None = None, deterministic: bool = False) -> None:
    """Join the world of ranks that the launcher started. A second call does nothing."""
    global _context
    if is_initialized():
        return
    # A spawned child imports the main script before it knows its parent; until then it is marked.
    inheriting = getattr(multiprocessing.current_process(), "_inheriting", False)
    if inheriting or multiprocessing.parent_process() is not None:
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
        wanted = config.timeline != Config.timeline
        # Rank 0 decides: others may lack its variables. Few jobs have a timeline.
        if not world.joined and world.communicator.gather_objects(wanted)[0]:
            from hvdtrain.core.timeline.start_stop import begin_from_environment

            recording = begin_from_environment(config, world.communicator, host)
    except Exception as error:
        install_plain_excepthook(
            silent=isinstance(error, HvdtrainError) and delay_startup_error(error)
        )
        raise
    topology = Topology.from_nodes(world.communicator.rank, world.nodes, world.hostnames)
    _guard_exits(config, topology, world.communicator)
    _end_workers_with_this_rank()
    try:
        if topology.size > 1:
            keep_freed_memory(os.environ)
        ordered = config.deterministic or deterministic
        if world.joined:
            from hvdtrain.core.recovery import open_of_newcomer

            _context = open_of_newcomer(config, world, ordered, _end_soon, _abort)
            _guard_exits(config, _context.topology, _context.world.communicator)
            _report_init()
            return
        warn_of_binding(world, topology)
        warn_of_idle_tasks(topology)
        _context = open_context(config, world, ordered, _end_soon)
        _context.record(recording)
        start_watches(_context, world.communicator, partial(_abort, world.communicator))
    except ExcludedError as error:
        _end_excluded(error)
    except Exception as error:  # other ranks may be blocked in an engine call forever
        assert _guard is not None
        _guard.fail(error)
        raise
    _report_init(first=topology.rank == 0)


def _report_init(first: bool = False) -> None:
    if SUPERVISOR in os.environ:
        from hvdtrain.milestones import STARTED, finish_init, report

        finish_init(os.environ)
        if first:
            report(STARTED, os.environ)


def _guard_exits(config: Config, topology: Topology, communicator: Communicator) -> None:
    """Have every exit of this rank pass through a guard."""
    global _guard
    if _guard is not None:
        _guard.uninstall()
    abort, any_thread = partial(_abort, communicator), config.abort_on_thread_exception
    _guard = ExitGuard(topology, shutdown, abort, any_thread, _save_records, _note)
    _guard.install()


@collective
def recover(leaving: Collection[int] = ()) -> Recovery:
    """Go on without the ranks that have ended (collective over those that are left).

    Call it when an operation has raised RanksLostError, or on all ranks, after `failures.agree`,
    when rank 0's `newcomer_waits` says that another rank can join. Afterwards ranks have new
    numbers, in the same order, and there are no pending operations. Process sets and wrapped
    optimizers that exist continue in the new world; gradients of an interrupted step are dropped.
    A rank whose connections were closed, so that others continued without it, ends here.
    """
    global _context
    before = current()
    if before.failures is None:
        raise UnsupportedError(
            f"{before.topology.title} recover: engine {before.engine_name} cannot continue without "
            "ranks that have ended: use engine mpi with Open MPI 5, under mpirun --with-ft ulfm"
        )
    from hvdtrain.core.recovery import open_next

    try:
        _context, recovery = open_next(before, before.failures, _abort, leaving)
    except ExcludedError as error:
        _end_excluded(error)
    except Exception as error:  # other ranks may be blocked in an engine call forever
        assert _guard is not None
        _guard.fail(error)
        raise
    _guard_exits(before.config, _context.topology, _context.world.communicator)
    _report_init(first=_context.topology.rank == 0)  # the first rank may have ended before it could
    return recovery


@contextmanager
@collective
def alone_if_newcomer() -> Iterator[None]:
    """Let a rank that has joined prepare what the others have, in a world of its own.

    What is made there is made again in the world of all with its next use, as after `recover`. It
    does nothing on other ranks, and after `accept_newcomers`.
    """
    global _context
    here = current()
    if not here.newcomer:
        yield
        return
    world = open_engine("local", here.config, os.environ)
    config = replace(here.config, flight_record="")  # it has one, in the world of all
    _context = open_context(config, world, here.ordered, here.failed)
    KNOWN_CALLS.clear()
    try:
        yield
    finally:
        _context = here
        KNOWN_CALLS.clear()


def accept_newcomers() -> None:
    """Say that the program takes in ranks that join, by `recover` (on all ranks).

    Rank 0 then starts others, if HVDTRAIN_MAX_RANKS asks for it. A rank that has joined calls it
    when it is to do from now on what the others do.
    """
    here = current()
    here.newcomer = False
    if not here.accepts:
        from hvdtrain.core.recovery import recruit

        here.accepts = True
        recruit(here)


def newcomer_waits() -> bool:
    """Return whether another rank can join by `recover` (local; False on all but rank 0)."""
    recruiter = current().recruiter
    return recruiter is not None and recruiter.waits


def _abort(communicator: Communicator, code: int) -> None:
    """End all ranks with an exit code, without waiting, and save the recording."""
    try:
        _save_records()
    finally:
        communicator.abort(code)


def _save_records() -> None:
    if _context is not None:
        _context.save_records()


def note_error(error: BaseException) -> None:
    """Note an error of this rank in the flight record (local)."""
    if _guard is not None and not isinstance(error, HostsUpdatedInterrupt):
        _guard.note_error(error)


def _note(kind: str, text: str) -> None:
    with suppress(Exception):  # the end of a rank must not depend on it
        if _context is not None and _context.flight is not None:
            _context.flight.note(kind, text)


def _end_excluded(error: ExcludedError) -> NoReturn:
    print(error, file=sys.stderr, flush=True)
    end_alone()


def end_alone() -> NoReturn:
    """End this process with exit code 0 and without others: MPI_Finalize would wait for them."""
    try:
        _save_records()
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
        if topology.local_rank == 0 and SUPERVISOR in os.environ:
            from hvdtrain.milestones import ENDED, report

            report(ENDED, os.environ)
        if _guard is not None:
            _guard.uninstall()


def is_initialized() -> bool:
    """Return whether this process has joined a world and not left it (local)."""
    return _context is not None and _context.process_id == _process_id


def current() -> Context:
    if _context is None:
        raise NotInitializedError("hvdtrain is not initialized: call init() first")
    if _context.process_id != _process_id:
        raise NotInitializedError("this is a forked child process, which is not a rank")
    return _context
