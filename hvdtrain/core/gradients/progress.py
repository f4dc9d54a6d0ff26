"""How far a step of gradients is. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["BucketProgress"]


@dataclass(frozen=True)
class BucketProgress:
    """How many buckets of a step are filled, and how many of these reduced, in order.

    Attributes:
        total: how many there are.
        filled: how many the program is through with.
        reduced: how many the ranks have reduced.
    """

    total: int
    filled: int = 0
    reduced: int = 0

    @property
    def complete(self) -> bool:
        """Whether all buckets are filled."""
        return self.filled == self.total

    @property
    def ready(self) -> bool:
        """Whether the next bucket to be reduced is filled."""
        return self.reduced < self.filled

    def fill(self, count: int = 1) -> BucketProgress:
        """Return what holds when the next `count` buckets are filled."""
        if self.filled + count > self.total:
            raise ValueError(f"{self.filled} of {self.total} buckets are filled: no {count} more")
        return replace(self, filled=self.filled + count)

    def reduce(self) -> BucketProgress:
        """Return what holds when the next bucket is reduced."""
        if not self.ready:
            raise ValueError(f"bucket {self.reduced} is not filled")
        return replace(self, reduced=self.reduced + 1)
