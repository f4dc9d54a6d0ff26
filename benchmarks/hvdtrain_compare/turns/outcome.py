"""Result of all turns of one contender."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain_compare.turns.contenders import Contender
from hvdtrain_compare.turns.turn import Turn


@dataclass(frozen=True)
class Difference:
    """How far the weights of a contender are from those of one process with the whole batch."""

    checked: float
    steps: int
    final: float


@dataclass(frozen=True)
class Outcome:
    """Result of all turns of one contender."""

    contender: Contender
    turns: tuple[Turn, ...]
    failure: str = ""
    difference: Difference | None = None
