"""Allgather, broadcast and alltoall of numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdtrain.core import operations
from hvdtrain.core.arrays.memory import Array, as_buffer, empty, from_buffer
from hvdtrain.core.process_set import ProcessSet, channel_of

__all__ = ["allgather", "alltoall", "broadcast"]


def allgather(
    arrays: Sequence[Array], name: str | None, process_set: ProcessSet
) -> list[tuple[Array, list[int]]]:
    """Return the concatenated arrays of a group (collective, blocking).

    Args:
        arrays: arrays of this rank; scalars count as one row.
        name: name of the operation, equal on all ranks; numbered if it is None.
        process_set: ranks that take part.

    Returns:
        Each concatenated array, and the number of its rows from each rank.
    """
    rows = [np.atleast_1d(array) for array in arrays]
    gathered = operations.allgather(
        channel_of(process_set), [as_buffer(array) for array in rows], [a.shape for a in rows], name
    ).run()
    return [
        (from_buffer(buffer, array.dtype, (sum(counts), *array.shape[1:])), counts)
        for array, (buffer, counts) in zip(rows, gathered, strict=True)
    ]


def broadcast(
    arrays: Sequence[Array], root_rank: int, names: Sequence[str | None], process_set: ProcessSet
) -> list[Array]:
    """Return the arrays of one rank on every rank (collective, blocking).

    Args:
        arrays: arrays of this rank, with equal shapes and dtypes on all ranks.
        root_rank: rank of the world that sends its arrays.
        names: names of the operations, equal on all ranks.
        process_set: ranks that take part.
    """
    results = [empty(array.shape, array.dtype) for array in arrays]
    channel, waits = channel_of(process_set), []
    for array, result, name in zip(arrays, results, names, strict=True):
        result[...] = array
        buffer = as_buffer(result)
        waits.append(operations.broadcast(channel, buffer, array.shape, root_rank, name).start())
    for wait in waits:
        wait.wait()
    return results


def alltoall(
    array: Array, splits: Array | None, name: str | None, process_set: ProcessSet
) -> tuple[Array, Array]:
    """Exchange rows between all ranks (collective, blocking).

    Args:
        array: rows of this rank.
        splits: number of rows to send to each rank, an integer array [size]; None for equal parts.
        name: name of the operation, equal on all ranks; numbered if it is None.
        process_set: ranks that take part.

    Returns:
        The received rows in rank order, and the number of rows from each rank, int32 [size].

    Raises:
        ValueError: the splits are not a 1-d array of integers, or do not match the rows.
    """
    counts = None
    if splits is not None:
        if splits.ndim != 1 or splits.dtype.kind not in "iu":
            raise ValueError(f"splits must be 1-d and whole numbers, got {splits}")
        counts = [int(count) for count in splits]
    buffer, received = operations.alltoall(
        channel_of(process_set), as_buffer(array), array.shape, counts, name
    ).run()
    rows = from_buffer(buffer, array.dtype, (sum(received), *array.shape[1:]))
    return rows, np.array(received, np.int32)
