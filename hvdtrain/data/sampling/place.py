"""Which of how many ranks data are read for."""

from __future__ import annotations

__all__ = ["place"]


def place(rank: int | None, size: int | None) -> tuple[int, int]:
    """Return rank and size; those of the running world where neither is given (local).

    Raises:
        ValueError: only one of them is given, or the rank is not one of `size` ranks.
        NotInitializedError: neither is given, before init().
    """
    if rank is None and size is None:
        # Deferred: data sets can be read without all that a world of ranks takes.
        from hvdtrain.core import horovod_api as world

        return world.rank(), world.size()
    if rank is None or size is None:
        raise ValueError(f"give both rank and size, or neither: got rank {rank}, size {size}")
    if not 0 <= rank < size:
        raise ValueError(f"rank must be between 0 and size - 1: got rank {rank}, size {size}")
    return rank, size
