"""Changes of the ranks of a run: those that were lost, and those that joined, as results tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["RanksJoined", "RanksLost"]


@dataclass(frozen=True)
class RanksLost:
    """Ranks that ended while the others went on.

    Attributes:
        step: steps done by then, or done in the state that the others go back to.
        epoch: epochs done in these steps, fractions included.
        trained_seconds: seconds of training by then, since the very first start.
        lost: numbers of the ranks that ended, as they were then.
        ranks: number of ranks that are left.
        seconds: time from the notice until the others were ready for the next step.
        global_batch_size: samples of all ranks per step since then.
        scaled_lr: learning rate after the warm-up since then.
        left: whether they left because they were asked to, by SIGUSR2.
        again: number of steps done by then that are taken again.
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
        step: steps done by then.
        epoch: epochs done by then, fractions included.
        trained_seconds: seconds of training by then, since the very first start.
        joined: numbers of the ranks that joined, as they are since then.
        ranks: number of ranks since then.
        seconds: time from the last step of the others until all were ready for the next one.
        start_seconds: time from the start of the processes until they were ready to join, in which
            the others went on; 0 if the rank that started them has ended.
        global_batch_size: samples of all ranks per step since then.
        scaled_lr: learning rate after the warm-up since then.
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
