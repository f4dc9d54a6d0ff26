"""Progress of a gradient step (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

# More than any number of backward passes: the program waits for the whole step.
UNTIL_STEP = 1 << 32


class Verdict(NamedTuple):
    """What a vote tells a rank about the next bucket."""

    certain: int
    released: bool = False
    missed: bool = False


@dataclass(frozen=True)
class BucketProgress:
    """The number of buckets of a step that are filled, and of those that are reduced, in order.

    Ranks reduce a bucket when all have filled it, which they find out by a vote. A rank that has
    not filled the next bucket votes only between backward passes, because a pass may yet fill it.
    """

    total: int
    filled: int = 0
    reduced: int = 0
    passes: int = 0
    between: bool = False

    @property
    def complete(self) -> bool:
        """Whether all buckets are filled."""
        return self.filled == self.total

    @property
    def ready(self) -> bool:
        """Whether the next bucket to be reduced is filled."""
        return self.reduced < self.filled

    def fill(self, count: int = 1) -> BucketProgress:
        """Return the progress after filling the next `count` buckets."""
        if self.filled + count > self.total:
            raise ValueError(f"{self.filled} of {self.total} buckets are filled: no {count} more")
        return replace(self, filled=self.filled + count)

    def reduce(self) -> BucketProgress:
        """Return the progress after reducing the next bucket."""
        if not self.ready:
            raise ValueError(f"bucket {self.reduced} is not filled")
        return replace(self, reduced=self.reduced + 1)

    def begin_pass(self) -> BucketProgress:
        """Return the progress after the first gradient of a backward pass."""
        return replace(self, between=False)

    def end_pass(self) -> BucketProgress:
        """Return the progress after the end of a backward pass."""
        return self if self.between else replace(self, between=True, passes=self.passes + 1)

    def vote(self, awaited: int) -> tuple[int, int, int]:
        """Return the vote on the next bucket, of which ranks take the maxima."""
        return self.total - self.filled, awaited, 0 if self.ready else UNTIL_STEP - self.passes

    def verdict(self, highest: Sequence[int]) -> Verdict:
        """Return what follows from the maxima of all votes, this rank's among them."""
        missing, awaited, fewest = highest
        certain = self.total - missing
        if certain > self.reduced:
            return Verdict(certain)
        ended = UNTIL_STEP - fewest  # by each of the ranks that have not filled it
        return Verdict(certain, self.passes <= ended, awaited > ended and not self.ready)
