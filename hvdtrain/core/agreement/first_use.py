"""What ranks settle together when it is first used, from whatever thread that is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from hvdtrain.core.agreement.channel import Channel

__all__ = ["FirstUse"]

T = TypeVar("T")


class FirstUse:
    """Settles each key once per channel.

    One thread of a rank settles a key while others that need it wait. Ranks whose threads arrive in
    different orders cannot block one another if all operations of an agreement are named after its
    key alone, since whichever thread runs them on a rank, they meet on the channel by name.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._agreements: WeakKeyDictionary[Channel, dict[Hashable, _Agreement]] = (
            WeakKeyDictionary()
        )

    def settle(self, channel: Channel, key: Hashable, agree: Callable[[], T]) -> T:
        """Return what a key stands for (collective the first time).

        Args:
            channel: of the ranks that agree.
            key: equal on all ranks.
            agree: settles it (collective over the channel), in operations named after the key. What
                it raises must be raised on all ranks; then nothing is settled, and each thread that
                waited tries for itself, so that all ranks try equally often.
        """
        with self._guard:
            agreements = self._agreements.setdefault(channel, {})
            agreement = agreements.setdefault(key, _Agreement())
        with agreement.lock:
            if not agreement.settled:
                agreement.value = agree()
                agreement.settled = True
        value: T = agreement.value
        return value

    def find(self, channel: Channel, key: Hashable) -> Any:
        """Return what a key stands for, or None while it is not settled (local)."""
        with self._guard:
            agreement = self._agreements.get(channel, {}).get(key)
        return None if agreement is None else agreement.value


class _Agreement:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.settled = False
        self.value: Any = None
