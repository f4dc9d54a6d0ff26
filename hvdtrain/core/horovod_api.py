"""Horovod's calls that are the same for every framework: init, ranks, what is built in."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import cast

from hvdtrain.collective import collective
from hvdtrain.core import context
from hvdtrain.core.agreement.channel import Submission
from hvdtrain.core.agreement.operation import Request, Work
from hvdtrain.core.context import is_initialized, shutdown
from hvdtrain.core.objects import call_on_root
from hvdtrain.core.process_set import (
    Mpi4pyCommunicator,
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from hvdtrain.errors import HorovodInternalError
from hvdtrain.types import ReduceOp

# What the modules of all frameworks have.
__all__ = [
    "Adasum",
    "Average",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "ddl_built",
    "global_process_set",
    "gloo_enabled",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "rank",
    "remove_process_set",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]

Average = ReduceOp.AVERAGE
"""The mean; of integers, truncated toward zero."""
Sum = ReduceOp.SUM
"""The sum."""
Min = ReduceOp.MIN
"""The smallest value of each element."""
Max = ReduceOp.MAX
"""The largest value of each element."""
Product = ReduceOp.PRODUCT
"""The product."""
Adasum = ReduceOp.ADASUM
"""A combination in which orthogonal tensors are added and equal ones averaged."""

# Functions that adapters have registered with on_init().
_init_actions: list[Callable[[], None]] = []


def on_init(action: Callable[[], None]) -> None:
    """Call a function at the beginning of each init(), and now if the world is joined (local).

    Args:
        action: function that prepares a framework; a second call must do nothing.
    """
    _init_actions.append(action)
    if context.is_initialized():
        action()


@collective
def init(
    comm: object = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
    engine: str | None = None,
) -> None:
    """Join the world of ranks that the launcher started (collective); see `context.init`.

    Args:
        comm: None, or all ranks as a list or an mpi4py communicator; use process sets for a part
            of the world.
        process_sets: sets to register, the same on every rank. "dynamic" is accepted: sets can
            always be added later. A second call registers none.
        engine: "auto" or the name of an engine; None uses HVDTRAIN_ENGINE, or "auto".

    Raises:
        ValueError: `comm` is not the whole world; see `context.init` for other errors.
    """
    if isinstance(comm, str):
        raise ValueError(f"init({comm!r}): the first argument is comm; write init(engine={comm!r})")
    for action in _init_actions:
        action()
    joins = not context.is_initialized()
    context.init(engine)
    if comm is not None and not _is_whole(comm, context.current().topology.size):
        raise ValueError(
            "init(comm) takes the whole world only: for a part of it pass "
            "process_sets=[ProcessSet(ranks)]"
        )
    if joins and process_sets is not None and not isinstance(process_sets, str):
        for process_set in process_sets:
            add_process_set(process_set)


def _is_whole(comm: object, size: int) -> bool:
    if isinstance(comm, Mpi4pyCommunicator):
        return comm.Get_size() == size
    return sorted(cast("Iterable[int]", comm)) == list(range(size))


def rank() -> int:
    """Return the number of this rank in the world, from 0 (local)."""
    return context.current().topology.rank


def size() -> int:
    """Return the number of ranks in the world (local)."""
    return context.current().topology.size


def local_rank() -> int:
    """Return the number of this rank on its node (local)."""
    return context.current().topology.local_rank


def local_size() -> int:
    """Return the number of ranks on this node (local)."""
    return context.current().topology.local_size


def cross_rank() -> int:
    """Return the number of this node among those that have this local rank (local)."""
    return context.current().topology.cross_rank


def cross_size() -> int:
    """Return the number of nodes that have this local rank (local)."""
    return context.current().topology.cross_size


def is_homogeneous() -> bool:
    """Return whether all nodes have the same number of ranks (local)."""
    return context.current().topology.homogeneous


def mpi_built() -> bool:
    """Return whether the package that engine mpi needs is installed (local)."""
    return importlib.util.find_spec("mpi4py") is not None


def mpi_enabled() -> bool:
    """Return whether engine mpi is in use; False before init() (local)."""
    return _moves_bytes("mpi")


def mpi_threads_supported() -> bool:
    """Return whether several threads may communicate at the same time (local)."""
    return context.current().world.communicator.capabilities.concurrent


def gloo_enabled() -> bool:
    """Return whether engine gloo is in use; False before init() (local)."""
    return _moves_bytes("gloo")


def ddl_built() -> bool:
    """Return whether IBM DDL is available: never (local)."""
    return False


def ccl_built() -> bool:
    """Return whether Intel oneCCL is available: never (local)."""
    return False


def gloo_built() -> bool:
    """Return whether torch, which brings Gloo, is installed (local)."""
    return importlib.util.find_spec("torch") is not None


def nccl_built() -> int:
    """Return NCCL's version: 0, since tensors of the framework go through host memory (local)."""
    return 0


def _moves_bytes(engine: str) -> bool:
    return context.is_initialized() and context.current().engine_name == engine


@collective
def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Start recording the waiting and communication times of all operations (collective).

    Args:
        file_path: file to which rank 0 writes the timeline of all ranks when it stops.
        mark_cycles: whether to mark the beginning of each round, which Horovod calls a cycle.

    Raises:
        ValueError: a timeline is being recorded already, or rank 0 cannot write the file.
    """
    from hvdtrain.core.timeline.file import TimelineError, usable_path  # most programs have none
    from hvdtrain.core.timeline.start_stop import begin

    here = context.current()
    if here.recording is not None:
        raise TimelineError(
            f"{here.topology.title} start_timeline: a timeline is being recorded already, to "
            f"{here.recording.path}: call stop_timeline() first"
        )
    path = call_on_root(partial(usable_path, os.fspath(file_path)))
    request = Request("start_timeline", details=(("mark_cycles", str(bool(mark_cycles))),))
    host = here.topology.hostnames[here.topology.rank]
    start = partial(begin, path=path, marks_rounds=bool(mark_cycles), host=host)
    here.record(Submission(here.world, Work(request, start)).run())


@collective
def stop_timeline() -> None:
    """Stop recording and write the file (collective); does nothing without a recording.

    Raises:
        ValueError: on rank 0, the file cannot be written.
    """
    here = context.current()
    recording = here.recording
    if recording is None:
        return
    from hvdtrain.core.timeline.start_stop import write_timeline

    Submission(here.world, Work(Request("barrier", "stop_timeline"))).run()
    here.record(None)
    gather = partial(write_timeline, recording=recording, hostnames=here.topology.hostnames)
    Submission(here.world, Work(Request("gather the timeline"), gather)).run()
