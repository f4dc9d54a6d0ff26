"""The order in which ranks joined, from what their channels know (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["JoinOrder", "last_to_join"]


@dataclass(frozen=True)
class JoinOrder:
    """What a channel knows of the order in which its members joined, the same on all of them.

    Attributes:
        ranks: ranks of the members in the world.
        seconds: time since each of them joined, as it measured it itself.
        behind: ranks that had joined when an operation of others ran or failed without them.
    """

    ranks: tuple[int, ...]
    seconds: tuple[float, ...]
    behind: frozenset[int] = frozenset()


def last_to_join(orders: Sequence[JoinOrder]) -> int:
    """Return the rank that joined last.

    A rank that missed an operation joined before those that took part in it, whatever the times
    are: each rank measures its own at a moment of its own, which a busy machine delays. They count
    among the ranks that missed none.

    Args:
        orders: what each channel of these ranks knows, in the same order on all of them.
    """
    seconds = dict(zip(orders[0].ranks, orders[0].seconds, strict=True))
    behind = frozenset[int]().union(*(order.behind for order in orders))
    last = [rank for rank in seconds if rank not in behind]
    return min(last or seconds, key=seconds.__getitem__)
