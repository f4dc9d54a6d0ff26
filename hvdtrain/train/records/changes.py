"""Changes of the ranks of a run: those that were lost, and those that joined, as results tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RanksLost:
    """Ranks that ended while the others went on.

    Attributes:
        seconds: time from the notice until the others were ready for the next step.
    """

    step: int
    epoch: float
    trained_seconds: float
    lost: Sequence[int]
    ranks: int
    seconds: float
    global_batch_size: int
    scaled_lr: float
    left: bool = False
    again: int = 0


@dataclass(frozen=True)
class RanksJoined:
    """Ranks that joined the others.

    Attributes:
        seconds: time from the last step of the others until all were ready for the next one.
    """

    step: int
    epoch: float
    trained_seconds: float
    joined: Sequence[int]
    ranks: int
    seconds: float
    start_seconds: float
    global_batch_size: int
    scaled_lr: float
