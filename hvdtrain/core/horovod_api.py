"""Horovod's calls that are the same for every framework: init, ranks, what is built in."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

from hvdtrain.core import context
from hvdtrain.core.process_set import ProcessSet, add_process_set

__all__ = [
    "Compressor",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "ddl_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "on_init",
    "rank",
    "size",
]


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


def init(
    comm: Any = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
    engine: str | None = None,
) -> None:
    """Join the world of ranks that the launcher started (collective); see `context.init`.

    Args:
        comm: None, or all ranks as a list or an mpi4py communicator; for a part of the world
            there are process sets.
        process_sets: sets to register at once, the same on every rank; "dynamic" is Horovod's
            word for sets that are added later, which always works here. A second call adds none.
        engine: "auto" or the name of an engine; None takes HVDTRAIN_ENGINE, or auto.

    Raises:
        ValueError: `comm` is not the whole world; see `context.init` for the others.
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


def _is_whole(comm: Any, size: int) -> bool:
    if hasattr(comm, "Get_size"):
        return bool(comm.Get_size() == size)
    return sorted(comm) == list(range(size))


def rank() -> int:
    """Return the number of this rank in the world, from 0."""
    return context.current().topology.rank


def size() -> int:
    """Return how many ranks the world has."""
    return context.current().topology.size


def local_rank() -> int:
    """Return the number of this rank among those that share its memory."""
    return context.current().topology.local_rank


def local_size() -> int:
    """Return how many ranks share this rank's memory."""
    return context.current().topology.local_size


def cross_rank() -> int:
    """Return the number of this rank's node among those that have its local rank."""
    return context.current().topology.cross_rank


def cross_size() -> int:
    """Return how many nodes have this rank's local rank."""
    return context.current().topology.cross_size


def is_homogeneous() -> bool:
    """Return whether all nodes have equally many ranks."""
    return context.current().topology.homogeneous


def mpi_built() -> bool:
    """Return whether the mpi engine can be used here, as far as installed packages tell."""
    return importlib.util.find_spec("mpi4py") is not None


def mpi_enabled() -> bool:
    """Return whether MPI moves the bytes; False before init()."""
    return _moves_bytes("mpi")


def mpi_threads_supported() -> bool:
    """Return whether several threads may communicate at once."""
    return context.current().world.communicator.capabilities.concurrent


def gloo_enabled() -> bool:
    """Return whether Gloo moves the bytes; False before init()."""
    return _moves_bytes("gloo")


def ddl_built() -> bool:
    """Return whether IBM DDL is there: it never is."""
    return False


def ccl_built() -> bool:
    """Return whether Intel oneCCL is there: it never is."""
    return False


def _moves_bytes(engine: str) -> bool:
    return context.is_initialized() and context.current().engine_name == engine


class Compressor:
    """Leaves tensors as they are; subclasses change `compress` and `decompress`."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return what is reduced instead of the tensor, and what decompress() needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the reduced tensor in its own type."""
        return tensor
