"""The shards of the weights: all parameters in a row, cut into equal parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

# Parameters are cut at multiples of this. Vectorized optimizers round the elements of a vector and
# those left over differently: these are then the same in the pieces as in the whole parameter.
_CUT_ELEMENTS = 64


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that is in a shard."""

    parameter: int
    start: int
    begin: int
    count: int


def shard_bounds(sizes: Sequence[int], servers: int) -> list[tuple[int, int]]:
    """Return where each shard begins and ends in the row of all parameters."""
    elements = sum(sizes)
    cuts = [_cut_before(sizes, elements * server // servers) for server in range(servers)]
    return list(pairwise([*cuts, elements]))


def _cut_before(sizes: Sequence[int], position: int) -> int:
    """Return the last place at or before a position where a parameter may be cut."""
    start = max(start for start in accumulate([0, *sizes]) if start <= position)
    return start + (position - start) // _CUT_ELEMENTS * _CUT_ELEMENTS


def pieces(sizes: Sequence[int], bounds: tuple[int, int]) -> Iterator[Piece]:
    """Yield the pieces of a shard in the order of the parameters."""
    first, end = bounds
    for parameter, (start, size) in enumerate(zip(accumulate([0, *sizes]), sizes, strict=False)):
        begin, stop = max(first, start), min(end, start + size)
        if begin < stop:
            yield Piece(parameter, begin - first, begin - start, stop - begin)
