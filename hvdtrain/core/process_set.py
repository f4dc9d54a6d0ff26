"""Sets of ranks that communicate among themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, cast, runtime_checkable

from hvdtrain.collective import collective
from hvdtrain.core import context
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.agreement.operation import Request, Work
from hvdtrain.errors import UnsupportedError
from hvdtrain.topology import format_ranks

__all__ = [
    "Mpi4pyCommunicator",
    "ProcessSet",
    "add_process_set",
    "can_lose_ranks",
    "channel_of",
    "global_process_set",
    "remove_process_set",
    "require_process_set",
    "stays_alone",
]


@runtime_checkable
class Mpi4pyCommunicator(Protocol):
    """The part of mpi4py.MPI.Comm that is used here."""

    def Get_size(self) -> int:
        """Return the number of ranks."""

    def allgather(self, sendobj: int) -> list[int]:
        """Return the objects of all ranks."""


class ProcessSet:
    """A set of ranks; to be registered with init() or add_process_set() before use.

    Args:
        ranks_or_comm: ranks of the world, or an mpi4py communicator of them.

    Raises:
        ValueError: it is neither.
    """

    def __init__(self, ranks_or_comm: object) -> None:
        self.ranks: list[int] | None = _ranks(ranks_or_comm)
        self.process_set_id: int | None = None

    def included(self) -> bool:
        """Return whether this rank belongs to the set (local)."""
        return context.current().topology.rank in (self.ranks or [])

    def rank(self) -> int | None:
        """Return this rank's number within the set; None before it is registered (local).

        Raises:
            ValueError: this rank does not belong to the set.
        """
        ranks = self._registered()
        if ranks is None:
            return None
        here = context.current().topology
        if here.rank not in ranks:
            members = format_ranks(ranks)
            raise ValueError(f"{here.title} does not belong to the process set of {members}")
        return ranks.index(here.rank)

    def size(self) -> int | None:
        """Return the number of ranks in the set; None before it is registered (local)."""
        ranks = self._registered()
        return None if ranks is None else len(ranks)

    def channel(self) -> Channel:
        """Return the channel of the set (local).

        Raises:
            ValueError: the set is not registered, this rank does not belong to it, or all of its
                ranks have ended.
        """
        here = context.current()
        ranks = self._registered()
        if ranks is None:
            raise ValueError(
                f"{self} is not registered: pass it to init() or add_process_set() first"
            )
        channel = here.process_set_channels.get(self.process_set_id)
        if channel is None and not ranks:
            were = format_ranks(here.emptied.get(self.process_set_id or 0, ()))
            raise ValueError(
                f"{here.topology.title} process set {self.process_set_id} has no rank left "
                f"(were {were}): remove it, or use another one"
            )
        if channel is None:
            title = here.topology.title
            raise ValueError(f"{title} does not belong to the process set of {format_ranks(ranks)}")
        return channel

    def _registered(self) -> list[int] | None:
        if self.process_set_id is None:
            return None
        # A number from before shutdown() is no longer valid.
        known = context.current().process_sets
        return self.ranks if known.get(self.process_set_id) == self.ranks else None

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _GlobalProcessSet(ProcessSet):
    """All ranks of the present world."""

    def __init__(self) -> None:
        self.process_set_id = 0

    @property
    def ranks(self) -> list[int]:  # type: ignore[override]
        """All ranks; none before init()."""
        here = context.current() if context.is_initialized() else None
        return [] if here is None else list(range(here.topology.size))

    def channel(self) -> Channel:
        return context.current().world

    def _registered(self) -> list[int]:
        context.current()  # which raises before init()
        return self.ranks


global_process_set: ProcessSet = _GlobalProcessSet()


def require_process_set(process_set: object) -> ProcessSet:
    """Return an argument of a user's program, after checking its type."""
    if isinstance(process_set, ProcessSet):
        return process_set
    raise TypeError(
        f"process_set={process_set!r} is not a ProcessSet: register the ranks once, on every rank "
        "of the world, with members = hvd.add_process_set([...]), and pass process_set=members"
    )


def channel_of(process_set: object) -> Channel:
    return require_process_set(process_set).channel()


@collective
def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a set of ranks (collective over all ranks of the world).

    Raises:
        ValueError: the set or one with the same ranks is registered already, or it contains ranks
            that are not in the world.
        MismatchError: ranks gave different sets.
        UnsupportedError: the engine does not support several threads.
    """
    here = context.current()
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    ranks = process_set.ranks or []
    _refuse_different(ranks)
    if process_set._registered() is not None:
        raise ValueError(f"{process_set} is registered already")
    if not ranks or ranks[0] < 0 or ranks[-1] >= here.topology.size:
        raise ValueError(
            f"a process set of {format_ranks(ranks)}: it takes ranks of a world of "
            f"{here.topology.size}"
        )
    if ranks == list(range(here.topology.size)) or ranks in here.process_sets.values():
        raise ValueError(f"a process set of {format_ranks(ranks)} is registered already")
    if here.topology.size > 1 and not here.world.communicator.capabilities.concurrent:
        raise UnsupportedError(
            f"process sets need an MPI that several threads may call; {here.library} was started "
            "without MPI_THREAD_MULTIPLE: unset MPI4PY_RC_THREAD_LEVEL if it is set, or use "
            "another MPI"
        )
    number = max(here.process_sets, default=0) + 1
    here.process_sets[number] = ranks
    channel = here.open_channel(ranks, f"process set {number}")
    if channel is not None:
        here.process_set_channels[number] = channel
    process_set.process_set_id = number
    return process_set


@collective
def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a set of ranks (collective over the world); return whether it was registered."""
    here = context.current()
    number = require_process_set(process_set).process_set_id
    if number is None or number == 0 or number not in here.process_sets:
        return False
    _refuse_different(here.process_sets[number])
    del here.process_sets[number]
    here.emptied.pop(number, None)
    channel = here.process_set_channels.pop(number, None)
    if channel is not None:
        from hvdtrain.core.bucket_plans import close_unused_plans

        close_unused_plans(channel)
        here.close_channel(channel)
    process_set.process_set_id = None
    return True


def _ranks(ranks_or_comm: object) -> list[int]:
    if isinstance(ranks_or_comm, Mpi4pyCommunicator):
        # Ranks have the same numbers in mpi4py's world.
        return sorted(ranks_or_comm.allgather(context.current().topology.rank))
    ranks: set[object] = set(ranks_or_comm) if isinstance(ranks_or_comm, Iterable) else {None}
    if not all(isinstance(rank, int) for rank in ranks):
        raise ValueError(
            f"a process set takes a list of ranks or an mpi4py communicator, got {ranks_or_comm!r}"
        )
    return sorted(cast("set[int]", ranks))


@collective
def _refuse_different(ranks: list[int]) -> None:
    request = Request("process set", details=(("of", format_ranks(ranks, most=len(ranks))),))
    context.current().world.run(Work(request))


def can_lose_ranks() -> bool:
    """Return whether the number of ranks may change while a function that is traced now is used."""
    return context.current().failures is not None


def stays_alone(process_set: ProcessSet) -> bool:
    """Return whether this rank is the only one of a process set, and remains so."""
    return process_set.size() == 1 and not can_lose_ranks()
