"""Votes on a reduction that carry its elements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum, auto

from hvdtrain.collective import collective

__all__ = ["Verdict", "VotedReduction"]


class Verdict(Enum):
    """The result of a vote on one operation, the same on all members.

    AGREED: all members propose it. DONE: it is also complete. DIFFERENT: not all propose it.
    """

    AGREED = auto()
    DONE = auto()
    DIFFERENT = auto()


class VotedReduction(ABC):
    """An allreduce of a few elements that is voted on and run in one call."""

    @abstractmethod
    @collective
    def __call__(self, ballot: bytes, source: int, target: int) -> Verdict:
        """Vote, and reduce if all members vote in this way for the same.

        Other members may call `start_max` with the ballot three times. Then none has reduced.

        Args:
            ballot: 16 bytes, equal on all members that propose the same: a hash and its complement.
        """
