"""Contenders whose result is known: sums of tensors, and trainers that must move weights alike."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from math import inf, isclose, log
from typing import TYPE_CHECKING, Protocol

import torch

from hvdtrain.errors import HvdtrainError
from hvdtrain_bench.analysis.judge import WHOLE
from hvdtrain_bench.harness.ranks import Ranks
from hvdtrain_bench.harness.turns import Contender

if TYPE_CHECKING:
    from hvdtrain_bench.cases.peers import Peer


# Elements are checked in pieces, so that the check does not need as much memory as the tensor.
_PIECE = 1 << 16
_PATTERN = 1.0 + torch.arange(_PIECE, dtype=torch.float32) % 8
# Repeated sums grow by the number of ranks with each call, and must stay within a float32.
_LARGEST = 1e30


class WrongResultError(HvdtrainError):
    """A library returned a wrong result."""


def fill(tensor: torch.Tensor, factor: float) -> None:
    """Write factor * (1 + i mod 8) into element i of a flat float32 tensor."""
    for start in range(0, tensor.numel(), _PIECE):
        piece = tensor[start : start + _PIECE]
        torch.mul(_PATTERN[: piece.numel()], factor, out=piece)


def require_factor(tensor: torch.Tensor, factor: float, what: str) -> None:
    """Check that element i is factor * (1 + i mod 8), up to rounding."""
    for start in range(0, tensor.numel(), _PIECE):
        piece = tensor[start : start + _PIECE]
        expected = _PATTERN[: piece.numel()] * factor
        if not torch.allclose(piece, expected, rtol=1e-5, atol=0.0):
            wrong = int((~torch.isclose(piece, expected, rtol=1e-5, atol=0.0)).nonzero()[0])
            raise WrongResultError(
                f"{what}: element {start + wrong} is {float(piece[wrong])}, but must be "
                f"{float(expected[wrong])}: this library does not sum right here"
            )


def sum_factor(ranks: int, calls: int) -> float:
    """Return the factor after `calls` in-place sums when rank r began with the factor r + 1.

    The first gives sum_r (r + 1) = n(n+1)/2 on every rank, and each further one n times that.
    """
    return ranks * (ranks + 1) / 2 * float(ranks) ** (calls - 1)


def most_calls(ranks: int) -> int:
    """Return how many in-place sums fit into the range of a float32."""
    return int(log(_LARGEST / (8 * sum_factor(ranks, 1))) / log(max(ranks, 2)))


def sum_contender(ranks: Ranks, peer: Peer, tensor: torch.Tensor) -> Contender:
    """Return a contender that sums a flat float32 tensor in each call; one check covers all."""
    latest = [tensor]

    def prepare() -> None:
        fill(tensor, ranks.rank + 1)
        latest[0] = tensor

    def call() -> None:
        latest[0] = peer.reduce(latest[0])

    def check(calls: int) -> None:
        what = f"{ranks.title} {peer.name}"
        require_factor(latest[0], sum_factor(ranks.size, calls), what)
        latest[0] = tensor

    return Contender(
        peer.name, peer.library, prepare, call, check, most_calls(ranks.size), turn=peer.turn
    )


# Libraries add in different orders, which makes little difference after a few steps.
TOLERANCE = 1e-4


class Trains(Protocol):
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
