"""Optimizers that continue in the next world when ranks are lost."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from weakref import WeakValueDictionary

from hvdtrain.collective import collective
from hvdtrain.core.agreement.votes import exchange
from hvdtrain.engines.communicator import Communicator

# The number of the world in which a follower was added, the members of its process set, and its
# number among the followers with the same members.
Key = tuple[int, tuple[int, ...], int]
# The number of steps, and the state after them.
Taken = tuple[int, object]


class Follower(ABC):
    """An object with the same state on the ranks of a process set, which take steps together."""

    @property
    @abstractmethod
    def steps(self) -> int:
        """Number of steps that are complete."""

    @steps.setter
    @abstractmethod
    def steps(self, steps: int) -> None: ...

    @abstractmethod
    def interrupt(self) -> None:
        """Drop what belongs to a step that was broken off."""

    @abstractmethod
    def state(self) -> object:
        """Return a picklable copy of the state after the last step."""

    @abstractmethod
    def take(self, state: object) -> None:
        """Take over the state of another rank that has completed one more step."""


class Followers:
    """The followers of this rank, while the program refers to them."""

    def __init__(self) -> None:
        self._followers: WeakValueDictionary[Key, Follower] = WeakValueDictionary()
        self._counts: Counter[tuple[int, ...]] = Counter()
        self._world = 0

    def add(self, follower: Follower, ranks: Sequence[int]) -> None:
        """Add a follower (in the same order on all ranks of its process set)."""
        members = tuple(ranks)
        self._counts[members] += 1
        self._followers[self._world, members, self._counts[members]] = follower

    def clear(self) -> None:
        """Forget all (on all ranks): the program makes others in the next world."""
        self._followers.clear()

    @property
    def world(self) -> int:
        """The number of worlds before this one."""
        return self._world

    def enter(self, world: int) -> None:
        """Count the worlds that there were before this rank joined."""
        self._world = world

    def interrupt(self) -> None:
        """Interrupt all, before ranks get other numbers."""
        for follower in list(self._followers.values()):
            follower.interrupt()

    @collective
    def compare(self, communicator: Communicator) -> Mapping[Key, Taken]:
        """Return the states that followers of this rank lack, for `catch_up`.

        A rank may have completed a step that was broken off on another one.
        """
        followers = dict(self._followers)
        own = {key: follower.steps for key, follower in followers.items()}
        steps = [theirs for (theirs,) in exchange(communicator, [own])]
        sources = dict[Key, int]()
        for key in sorted(set().union(*steps)):
            taken = [theirs.get(key, -1) for theirs in steps]
            if any(0 <= count < max(taken) for count in taken):
                sources[key] = taken.index(max(taken))
        if not sources:
            return {}
        sent = {
            key: (own[key], follower.state())
            for key, follower in followers.items()
            if sources.get(key) == communicator.rank
        }
        received: dict[Key, Taken] = {}
        for (states,) in exchange(communicator, [sent]):
            received.update(states)
        return {
            key: (count, state)
            for key, (count, state) in received.items()
            if own.get(key, count) < count
        }

    def catch_up(self, states: Mapping[Key, Taken]) -> None:
        """Take over the states that `compare` has returned, in a world of other ranks."""
        for key, (steps, state) in states.items():
            follower = self._followers.get(key)
            if follower is not None:
                follower.take(state)
                follower.steps = steps
        self._world += 1
        self._counts.clear()
