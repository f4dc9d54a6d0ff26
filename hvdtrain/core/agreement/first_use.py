"""Agreements that ranks make once, on first use, whichever thread comes first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from hvdtrain.collective import collective
from hvdtrain.core.agreement.channel import Channel

T = TypeVar("T")


class FirstUse:
    """Values on which the ranks of a channel agree once, by key.

    One thread of a rank makes an agreement while the others that need it wait. Ranks whose threads
    arrive in different orders cannot block one another if the names of all operations of an
    agreement depend only on its key, because operations are matched by name whichever thread
    submits them.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._agreements: WeakKeyDictionary[Channel, dict[Hashable, _Agreement]] = (
            WeakKeyDictionary()
        )

    @collective
    def settle(self, channel: Channel, key: Hashable, agree: Callable[[], T]) -> T:
        """Return the value of a key, calling `agree` on first use (collective then)."""
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
        """Return the value of a key, or None if it is not settled."""
        with self._guard:
            agreement = self._agreements.get(channel, {}).get(key)
        return None if agreement is None else agreement.value


class _Agreement:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.settled = False
        self.value: Any = None
