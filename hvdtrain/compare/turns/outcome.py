"""What came of all turns of a contender."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.compare.turns.contenders import Contender
from hvdtrain.compare.turns.turn import Turn

__all__ = ["Difference", "Outcome"]


@dataclass(frozen=True)
class Difference:
    """How far the weights of a contender are from those of one process with the whole batch.

    Attributes:
        checked: max |w - w'| after `steps` steps.
        steps: number of steps.
        final: the same at the end.
    """

    checked: float
    steps: int
    final: float


@dataclass(frozen=True)
class Outcome:
    """What came of all turns of a contender.

    Attributes:
        contender: contender.
        turns: its turns.
        failure: why it has stopped; "" if it has not.
        difference: distance from one process; None if that has not run.
    """

    contender: Contender
    turns: tuple[Turn, ...]
    failure: str = ""
    difference: Difference | None = None
