"""Horovod's elastic training in a world that is fixed: no rank comes, and one that fails ends it.

What is left of it here: all ranks start from rank 0's state, and go back to what was committed.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

__all__ = ["ObjectState", "run"]

F = TypeVar("F", bound=Callable[..., Any])


class ObjectState:
    """Values that can be committed, restored, and made equal on all ranks.

    Args:
        bcast_object: returns rank 0's object on every rank.
        get_rank: for Horovod's sake; it is not needed.
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
        """Remember the values as they are now (local)."""
        self.save()
        self.check_host_updates()

    def save(self) -> None:
        """Copy the values in memory (local)."""
        self._saved = copy.deepcopy(self._values())

    def restore(self) -> None:
        """Go back to the values of the last commit() or sync(), or else the first ones (local)."""
        self._set(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Take rank 0's values on every rank, and commit them (collective)."""
        self._set(self._bcast_object(self._values()))
        self.save()

    def check_host_updates(self) -> None:
        """Do nothing (local): in a fixed world no host comes or goes."""

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Do nothing (local): in a fixed world there is no reset that would call them."""

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


def run(func: F) -> F:
    """Decorate `func(state, ...)` so that it starts from rank 0's state on every rank (collective).

    It runs once, on the ranks that the launcher started. Where Horovod would go on with other
    ranks after a failure, the job ends: write checkpoints, and start it again.
    """

    @functools.wraps(func)
    def synchronized(state: ObjectState, *args: Any, **kwargs: Any) -> Any:
        state.sync()
        return func(state, *args, **kwargs)

    return cast("F", synchronized)
