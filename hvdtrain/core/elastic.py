"""Horovod's elastic interface in a world of fixed size, where a rank that fails ends the job.

It synchronizes the state of all ranks with rank 0's, and can commit and restore it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

__all__ = ["ObjectState", "run"]

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

    def sync(self) -> None:
        """Replace the values on every rank by rank 0's, and save them (collective)."""
        self._set(self._bcast_object(self._values()))
        self.save()

    def check_host_updates(self) -> None:
        """Return at once (local): the hosts of a job never change."""

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Ignore the callbacks (local): the world is never reset."""

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


def run(func: F) -> F:
    """Decorate `func(state, ...)` to start from rank 0's state on every rank (collective).

    The function runs once, on the ranks that the launcher started. Where Horovod would continue
    with other ranks after a failure, the job ends: write checkpoints and start it again.
    """

    @functools.wraps(func)
    def synchronized(state: ObjectState, *args: Any, **kwargs: Any) -> Any:
        state.sync()
        return func(state, *args, **kwargs)

    return cast("F", synchronized)
