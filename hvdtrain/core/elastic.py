"""Horovod's elastic interface: the state of all ranks is synchronized, committed and restored.

Where the engine can continue without killed ranks, `run` does; elsewhere they end the job.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

from hvdtrain.collective import collective
from hvdtrain.core import context
from hvdtrain.core.membership import Context
from hvdtrain.core.objects import broadcast_object as _broadcast_object
from hvdtrain.errors import EXIT_REQUEUE, HostsUpdatedInterrupt, HvdtrainError, RanksLostError
from hvdtrain.topology import format_ranks

__all__ = ["ObjectState", "require_all", "run", "tells_of_lost_ranks"]

F = TypeVar("F", bound=Callable[..., Any])


class ObjectState:
    """Values that can be committed, restored, and synchronized between ranks.

    Args:
        bcast_object: function that returns rank 0's object on every rank.
        get_rank: unused; present for compatibility with Horovod.
        kwargs: picklable objects, which become attributes.
    """

    def __init__(
        self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any
    ) -> None:
        self._bcast_object = bcast_object
        self._names = list(kwargs)
        self._reset_callbacks: list[Callable[[], None]] = []
        self._set(kwargs)
        self.save()

    def commit(self) -> None:
        """Save the values (local)."""
        self.save()
        self.check_host_updates()

    def save(self) -> None:
        """Save a copy of the values in memory (local)."""
        self._saved = copy.deepcopy(self._values())

    def restore(self) -> None:
        """Restore the values of the last commit() or sync(), or the initial ones (local)."""
        self._set(copy.deepcopy(self._saved))

    @collective
    def sync(self) -> None:
        """Replace the values on every rank by rank 0's, and save them (collective)."""
        self._set(self._bcast_object(self._values()))
        self.save()

    @collective
    def check_host_updates(self) -> None:
        """Interrupt the function that `run` calls if a rank waits to join (collective).

        Return at once where no ranks are started: see HVDTRAIN_MAX_RANKS.

        Raises:
            HostsUpdatedInterrupt: on all ranks, one does.
        """
        here = context.current()
        if here.failures is None or not here.accepts or not here.config.max_ranks:
            return
        if _broadcast_object(context.newcomer_waits(), 0, "elastic.joins"):
            here.failures.agree(True)  # what follows would break off the broadcast of a slow rank
            raise _NewcomerWaits

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Have functions be called each time that `run` continues with other ranks.

        Ranks that have just joined do not call them.

        Args:
            callbacks: functions; they may use the new size, for a learning rate for example.
        """
        self._reset_callbacks += callbacks

    def on_reset(self) -> None:
        """Call reset() and the callbacks; `run` does, before it synchronizes the state."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def reset(self) -> None:
        """Do nothing; a subclass may change what depends on the number of ranks."""

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


def run(func: F) -> F:
    """Decorate `func(state, ...)` to start from rank 0's state and survive killed ranks.

    All ranks call it. If ranks are killed, those that are left restore the last commit, are
    renumbered, call the reset callbacks, synchronize the state, and call the function again.
    When ranks join, those that were there do so without restoring.

    That takes Open MPI 5, with `python -m hvdtrain run --elastic` or `mpirun --with-ft ulfm`;
    elsewhere the job ends. If fewer than HVDTRAIN_MIN_RANKS (--min-np) are left, they exit with 75.
    """

    @functools.wraps(func)
    def going_on(state: ObjectState, *args: Any, **kwargs: Any) -> Any:
        has_state = not context.current().newcomer
        context.accept_newcomers()
        resets, synchronizes = False, True
        while True:
            failed: Exception | None = None
            try:
                if resets:
                    state.on_reset()
                if synchronizes:
                    state.sync()
                    has_state = True
                result = func(state, *args, **kwargs)
                require_all()
                return result
            except _NewcomerWaits:
                synchronizes = True
                _go_on_in_next_world(None)
            except HostsUpdatedInterrupt as interrupt:
                synchronizes = not interrupt.skip_sync
            except Exception as error:
                if not tells_of_lost_ranks(error, context.current()):
                    raise
                failed, synchronizes = error, True
            if failed is not None:
                state.restore()
                _go_on_in_next_world(failed)
                if not has_state and context.current().topology.rank == 0:
                    raise HvdtrainError("no rank is left that has trained: start the job again")
            resets = True

    return cast("F", going_on)


class _NewcomerWaits(HostsUpdatedInterrupt):
    """A rank waits to join, on all ranks."""


@collective
def require_all() -> None:
    """Check that no rank has ended before all are through.

    Another rank may have met a loss in its last operation, and need this one to continue.
    """
    here = context.current()
    if here.failures is not None and not here.failures.agree(True):
        raise RanksLostError(f"{here.topology.title} a rank ended before all were through")


@collective
def _go_on_in_next_world(failed: Exception | None) -> None:
    """Recover, and exit if too few ranks are left (collective over them)."""
    recovery = context.recover()
    # An object of an earlier world would fail again and again.
    if failed is not None and not recovery.lost:
        raise failed
    here = context.current()
    size, least = here.topology.size, here.config.min_ranks
    ends = f", fewer than --min-np {least}: the job ends" if size < least else ""
    changes = []
    if recovery.lost:
        lost = f"{format_ranks(recovery.lost)} of {recovery.size_before}"
        changes.append(f"{lost} ended; {recovery.left} left")
    if recovery.joined:
        changes.append(f"{format_ranks(recovery.joined)} joined; {size} ranks")
    if here.topology.rank == 0 and changes:
        text = f"{', '.join(changes)} after {recovery.seconds:.2f} s{ends}"
        print(f"hvdtrain: {text}", file=sys.stderr, flush=True)
    if ends:
        sys.exit(EXIT_REQUEUE)


def tells_of_lost_ranks(error: Exception, world: Context) -> bool:
    """Return whether an error means that ranks have ended, and the others can continue."""
    if world.failures is None:
        return False
    try:
        world.failures.check()
    except RanksLostError:
        return True
    return isinstance(error, RanksLostError)
