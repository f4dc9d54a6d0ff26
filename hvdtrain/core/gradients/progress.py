"""Progress of a gradient step (pure)."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["BucketProgress"]


@dataclass(frozen=True)
class BucketProgress:
    """The number of buckets of a step that are filled, and of those that are reduced, in order.

    Attributes:
        total: number of buckets.
        filled: number of buckets that the program has filled.
        reduced: number of buckets that the ranks have reduced.
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
        """Return the progress after filling the next `count` buckets.

        Raises:
            ValueError: there are not so many buckets left.
        """
        if self.filled + count > self.total:
            raise ValueError(f"{self.filled} of {self.total} buckets are filled: no {count} more")
        return replace(self, filled=self.filled + count)

    def reduce(self) -> BucketProgress:
        """Return the progress after reducing the next bucket.

        Raises:
            ValueError: the bucket is not filled.
        """
        if not self.ready:
            raise ValueError(f"bucket {self.reduced} is not filled")
        return replace(self, reduced=self.reduced + 1)
