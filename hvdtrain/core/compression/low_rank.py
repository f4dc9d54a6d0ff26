"""Products of a large matrix and a thin one, in few passes over memory."""

from __future__ import annotations

from collections.abc import Iterator

from hvdtrain.arrays import Array, is_tensor, like_shape, namespace

# Elements of a block: three fit into a core's cache, and with ranks up to 8 OpenBLAS multiplies one
# in the calling thread. Its other threads would spin long after each product.
_BLOCK = 1 << 15


def times_transposed(thin: Array, matrix: Array) -> Array:
    """Return `thin` times the transposed matrix, [rank, n].

    Args:
        thin: [rank, m].
        matrix: [n, m], contiguous.
    """
    made = like_shape(matrix, (thin.shape[0], matrix.shape[0]))
    for rows in _blocks(matrix):
        made[:, rows] = thin @ matrix[rows].T
    return made


def times(thin: Array, matrix: Array) -> Array:
    """Return `thin` times the matrix, [rank, m].

    Args:
        thin: [rank, n].
        matrix: [n, m], contiguous.
    """
    made = like_shape(matrix, (thin.shape[0], matrix.shape[1]))
    made[...] = 0
    for rows in _blocks(matrix):
        made += thin[:, rows] @ matrix[rows]
    return made


def split(matrix: Array, left: Array, own: Array, error: Array, total: Array) -> None:
    """Write a matrix minus `left`^T `own` to `error`, and overwrite it with `left`^T `total`.

    Args:
        matrix: [n, m], contiguous.
        left: [rank, n].
        own: [rank, m].
        error: memory for the error, [n, m], contiguous.
        total: [rank, m].
    """
    xp = namespace(matrix)
    for rows in _blocks(matrix):
        columns, values = left[:, rows].T, matrix[rows]
        xp.subtract(values, columns @ own, out=error[rows])
        xp.matmul(columns, total, out=values)


def _blocks(matrix: Array) -> Iterator[slice]:
    """Yield the rows of blocks; torch divides its work itself."""
    count, length = matrix.shape
    rows = count if is_tensor(matrix) else max(1, _BLOCK // length)
    for first in range(0, count, rows):
        yield slice(first, min(first + rows, count))
