"""Where this rank is, in Horovod's words. All of these are local."""

from __future__ import annotations

from hvdtrain.core import context

__all__ = [
    "cross_rank",
    "cross_size",
    "is_homogeneous",
    "local_rank",
    "local_size",
    "rank",
    "size",
]


def rank() -> int:
    """Return the number of this rank in the world, from 0."""
    return context.current().topology.rank


def size() -> int:
    """Return how many ranks the world has."""
    return context.current().topology.size


def local_rank() -> int:
    """Return the number of this rank among those that share its memory."""
    return context.current().topology.local_rank


def local_size() -> int:
    """Return how many ranks share this rank's memory."""
    return context.current().topology.local_size


def cross_rank() -> int:
    """Return the number of this rank's node among those that have its local rank."""
    return context.current().topology.cross_rank


def cross_size() -> int:
    """Return how many nodes have this rank's local rank."""
    return context.current().topology.cross_size


def is_homogeneous() -> bool:
    """Return whether all nodes have equally many ranks."""
    return context.current().topology.homogeneous
