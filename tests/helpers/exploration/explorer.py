"""Visits every state that a model can reach, whatever happens in which order.

In a test:

    seen = explore(model)       # of class Model
    seen.states                 # how many there are
    seen.fault                  # "" or what is wrong, and the moves that lead there
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

S = TypeVar("S", bound=Hashable)


class Fault(Exception):
    """An invariant is broken; the message says which."""


class Model(Protocol[S]):
    """What is explored."""

    def first(self) -> S:
        """Return the state in which all begins."""

    def moves(self, state: S) -> Iterable[tuple[str, S]]:
        """Return what can happen next, each with the state that it leads to."""

    def is_end(self, state: S) -> bool:
        """Return whether nothing needs to happen any more."""


@dataclass(frozen=True)
class Explored:
    """What was found."""

    states: int
    fault: str = ""


class _Visited(Generic[S]):
    """The states that have been reached, and how."""

    def __init__(self, first: S) -> None:
        self.came_from: dict[S, tuple[S, str] | None] = {first: None}
        self.followers: dict[S, list[S]] = {}

    def path(self, state: S) -> str:
        moves: list[str] = []
        step = self.came_from[state]
        while step is not None:
            before, move = step
            moves.append(move)
            step = self.came_from[before]
        return " -> ".join(reversed(moves)) or "at the start"


def explore(model: Model[S], most: int = 2_000_000) -> Explored:
    """Visit every state, breadth first, so that a fault comes with one of the shortest ways to it.

    Beside what the model itself objects to, it is a fault that an end cannot be reached from some
    state: the ranks hang there, or go round for ever.
    """
    visited: _Visited[S] = _Visited(model.first())
    todo, ends = deque(visited.came_from), []
    while todo:
        state = todo.popleft()
        try:
            if model.is_end(state):
                ends.append(state)
                continue
            following = list(model.moves(state))
        except Fault as fault:
            return Explored(len(visited.came_from), f"{fault}: {visited.path(state)}")
        visited.followers[state] = [after for _, after in following]
        for move, after in following:
            if after not in visited.came_from:
                visited.came_from[after] = state, move
                todo.append(after)
        if len(visited.came_from) > most:
            raise AssertionError(f"more than {most} states")
    stuck = _cannot_end(visited, ends)
    lost = "" if stuck is None else f"no end can be reached: {visited.path(stuck)}"
    return Explored(len(visited.came_from), lost)


def _cannot_end(visited: _Visited[S], ends: list[S]) -> S | None:
    """Return the first state from which no end can be reached."""
    before: dict[S, list[S]] = {}
    for state, following in visited.followers.items():
        for after in following:
            before.setdefault(after, []).append(state)
    ending, todo = set(ends), list(ends)
    while todo:
        for state in before.get(todo.pop(), ()):
            if state not in ending:
                ending.add(state)
                todo.append(state)
    return next((state for state in visited.came_from if state not in ending), None)
