"""The shards of the weights: all parameters in a row, cut into equal parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from hvdtrain.data.sampling.sharding import rank_slice

__all__ = ["Piece", "pieces", "shard_bounds"]


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that is in a shard.

    Attributes:
        parameter: number of the parameter.
        start: its first element in the shard.
        begin: its first element in the flat parameter.
        count: number of elements.
    """

    parameter: int
    start: int
    begin: int
    count: int


def shard_bounds(elements: int, servers: int) -> list[tuple[int, int]]:
    """Return where each shard begins and ends in the row of all parameters.

    Args:
        elements: number of elements of all parameters.
        servers: number of shards, whose sizes differ by one element at most.
    """
    parts = [rank_slice(elements, server, servers) for server in range(servers)]
    return [(part.start, part.stop) for part in parts]


def pieces(sizes: Sequence[int], bounds: tuple[int, int]) -> Iterator[Piece]:
    """Yield the pieces of a shard in the order of the parameters.

    Args:
        sizes: number of elements of each parameter.
        bounds: where the shard begins and ends in the row of all parameters.
    """
    first, end = bounds
    for parameter, (start, size) in enumerate(zip(accumulate([0, *sizes]), sizes, strict=False)):
        begin, stop = max(first, start), min(end, start + size)
        if begin < stop:
            yield Piece(parameter, begin - first, begin - start, stop - begin)
