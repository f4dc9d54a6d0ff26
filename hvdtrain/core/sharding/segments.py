"""Which elements of which parameters a rank owns, and where their state lies (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from hvdtrain.core.gradients.plan import BucketPlan
from hvdtrain.engines.communicator import aligned_bounds
from hvdtrain.types import DType

# Each quantity of a segment begins on a cache line of its own.
_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class Segment:
    """Contiguous elements of a parameter that have one owner; `whole` if all always have."""

    parameter: int
    first: int
    count: int
    bucket: int
    start: int
    whole: bool = False

    @property
    def in_parameter(self) -> slice:
        """The elements of the parameter, in its order in memory."""
        return slice(self.first, self.first + self.count)

    @property
    def in_bucket(self) -> slice:
        """The elements of the bucket."""
        return slice(self.start, self.start + self.count)


def segments_of(
    plan: BucketPlan, owners: int, costs: Sequence[int] | None = None
) -> list[list[Segment]]:
    """Return the segments of each owner: of slices of buckets, in the order of the plan.

    An owner has at most one segment of a parameter, and every element has exactly one owner.
    Parameters without elements belong to the first owner, because they have a state, too. With
    costs, owners have whole parameters of about equal cost together: the costliest parameters are
    given first, each to the owner that has the least by then.
    """
    found: list[list[Segment]] = [[] for _ in range(owners)]
    if costs is not None:
        totals = [0] * owners
        for index in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
            owner, number = totals.index(min(totals)), plan.bucket_of[index]
            totals[owner] += costs[index]
            bucket, count = plan.buckets[number], plan.specs[index].count
            start = bucket.starts[bucket.parameters.index(index)]
            found[owner].append(Segment(index, 0, count, number, start, whole=True))
        return found
    for number, bucket in enumerate(plan.buckets):
        bounds = pairwise(aligned_bounds(bucket.count, owners))
        for segments, (low, high) in zip(found, bounds, strict=True):
            for index, begin in zip(bucket.parameters, bucket.starts, strict=True):
                start, end = max(low, begin), min(high, begin + plan.specs[index].count)
                empty = not plan.specs[index].count and segments is found[0]
                if empty:
                    segments.append(Segment(index, 0, 0, number, begin))
                elif start < end:
                    segments.append(Segment(index, start - begin, end - start, number, start))
    return found


def newton_schulz_cost(shape: Sequence[int]) -> int:
    """Return what it costs to orthogonalize a matrix, in products of two numbers for one step.

    With the short side a and the long side b these are a b a + a a a + a a b.
    """
    count = prod(shape)
    short, long = sorted((shape[0], count // shape[0])) if count and shape else (count, count)
    return short * short * (short + 2 * long)


@dataclass(frozen=True)
class GatheredBucket:
    """What owners send of a bucket's parameters, and where these are when all are gathered."""

    counts: list[int]
    starts: Mapping[int, int]

    @classmethod
    def of(
        cls, plan: BucketPlan, number: int, segments: Sequence[Sequence[Segment]]
    ) -> GatheredBucket:
        """Return it for the slices of a bucket, or for whole parameters, which lie elsewhere."""
        bucket, owners = plan.buckets[number], len(segments)
        starts = dict(zip(bucket.parameters, bucket.starts, strict=True))
        counts = [aligned_bounds(bucket.count, owners)[1]] * owners
        if any(segment.whole for own in segments for segment in own):
            counts, end = [], 0
            for own in segments:
                begin = end
                for segment in own:
                    if segment.bucket == number:
                        starts[segment.parameter] = end
                        # The next one begins on a cache line of its own.
                        end += -(-segment.count // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
                counts.append(end - begin)
        return cls(counts, starts)

    def place(self, segment: Segment, owner: int) -> slice:
        """Return where a segment is in what its owner sends."""
        start = self.starts[segment.parameter] + segment.first - sum(self.counts[:owner])
        return slice(start, start + segment.count)


@dataclass(frozen=True)
class Quantity:
    """What an optimizer keeps for a parameter under one name."""

    name: str
    dtype: DType
    elementwise: bool
    tensor: bool = True

    def count(self, elements: int) -> int:
        """Return how many numbers there are for a segment of so many elements."""
        return elements if self.elementwise else 1


@dataclass(frozen=True)
class StateLayout:
    """Positions of an owner's optimizer state in one memory, in bytes.

    The memory begins with one byte for each segment: whether there is a state for it.
    """

    numbers: Mapping[int, int]
    offsets: Mapping[tuple[int, str], int]
    nbytes: int

    @classmethod
    def of(
        cls, segments: Sequence[Segment], quantities: Sequence[Mapping[str, Quantity]]
    ) -> StateLayout:
        numbers = {segment.parameter: number for number, segment in enumerate(segments)}
        offsets: dict[tuple[int, str], int] = {}
        end = len(segments)
        for segment in segments:
            for quantity in quantities[segment.parameter].values():
                end = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
                offsets[segment.parameter, quantity.name] = end
                end += quantity.count(segment.count) * quantity.dtype.itemsize
        return cls(numbers, offsets, end)
