"""Trainers as contenders: all that train together must move the weights alike."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from math import inf, isclose
from typing import Protocol

from hvdtrain_bench.analysis.judge import WHOLE
from hvdtrain_bench.cases.sums import WrongResultError
from hvdtrain_bench.harness.ranks import Ranks
from hvdtrain_bench.harness.turns import Contender

# Libraries add in different orders, which makes little difference after a few steps.
TOLERANCE = 1e-4


class Trains(Protocol):
    """A model in training."""

    def restart(self) -> None:
        """Return to the first weights."""

    def step(self) -> None:
        """Train one step."""

    def moved(self) -> float:
        """Return the sum of the absolute changes of all weights; a turn ends with it."""


class Agreement:
    """Turns trainers into contenders, and compares how far their weights have moved."""

    def __init__(self, ranks: Ranks, exact: bool = False, alike: bool = True) -> None:
        # Whether all ranks together take the same steps as one rank with the whole batch, and
        # whether all turns do; else the ranks of each turn have equal weights.
        self._ranks, self._exact, self._alike = ranks, exact, alike
        self._expected: dict[int, tuple[str, float]] = {}

    def together(
        self,
        name: str,
        library: str,
        trainer: Trains,
        turn: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Contender:
        """Return a contender in which all ranks train and average their gradients."""

        def check(calls: int) -> None:
            self._compare(name, calls, self._ranks.all_of(trainer.moved()))

        return Contender(name, library, trainer.restart, trainer.step, check, turn=turn, meets=True)

    def without_communication(self, name: str, library: str, trainer: Trains) -> Contender:
        """Return a contender in which all ranks train at once, each on its own."""

        def check(_: int) -> None:
            self._require_movement(name, trainer.moved())

        return Contender(name, library, trainer.restart, trainer.step, check, meets=True)

    def on_root(self, name: str, library: str, trainer: Trains) -> Contender:
        """Return a contender in which rank 0 trains and the others sleep."""
        is_root = self._ranks.rank == 0

        def check(calls: int) -> None:
            moved = self._ranks.of_root(trainer.moved() if is_root else 0.0)
            self._require_movement(name, moved)
            if name == WHOLE and self._exact:
                self._compare(name, calls, [moved])

        return Contender(
            name,
            library,
            trainer.restart if is_root else _rest,
            trainer.step if is_root else _rest,
            check,
        )

    def _compare(self, name: str, calls: int, moved: list[float]) -> None:
        first, expected = f"{name} on rank 0", moved[0]
        if self._alike:
            first, expected = self._expected.setdefault(calls, (first, expected))
        tolerance = TOLERANCE if self._alike else 0
        for rank, value in enumerate(moved):
            if not isclose(value, expected, rel_tol=tolerance) or not 0 < value < inf:
                raise WrongResultError(
                    f"{name} on rank {rank}: {calls} steps moved the weights by {value:.9g}, but "
                    f"{first} by {expected:.9g}: they do not train the same model"
                )

    def _require_movement(self, name: str, moved: float) -> None:
        if not 0 < moved < inf:
            raise WrongResultError(f"{self._ranks.title} {name}: the weights moved by {moved}")


def _rest() -> None:
    pass
