"""The elements of a slice as rows, each of which has a range of its own when it is quantized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.arrays import Array
from hvdtrain.core.gradients.exchange import FilledBucket, ParameterSlice
from hvdtrain.core.gradients.plan import ParameterSpec

# Shorter columns are divided into blocks of this length.
_LEAST_COLUMN = 64
_COLUMN_BLOCK = 512


@dataclass(frozen=True)
class BlockTable:
    """Elements of parameters as rows of one length.

    Attributes:
        views: views of the elements, each [rows, length] with at least one row, of any strides.
    """

    views: Sequence[Array]

    @property
    def count(self) -> int:
        """Number of rows."""
        return sum(view.shape[0] for view in self.views)

    def rows(self, low: int, high: int) -> list[Array]:
        """Return views of the rows from `low` up to `high`, each with at least one row."""
        found, first = [], 0
        for view in self.views:
            part = view[max(low - first, 0) : max(high - first, 0)]
            if part.shape[0]:
                found.append(part)
            first += view.shape[0]
        return found


def block_tables(
    bucket: FilledBucket, elements: Array, start: int, block: int
) -> tuple[list[BlockTable], list[Array]]:
    """Divide a slice of a bucket into rows, and into views of what fills no row."""
    views: dict[int, list[Array]] = {}
    rest = []
    for piece in bucket.pieces(elements, start):
        columns = _columns(piece, bucket.specs[piece.index]) if block == 0 else None
        if columns is not None:
            views.setdefault(columns.shape[1], []).append(columns)
            continue
        length = block or _COLUMN_BLOCK
        whole = piece.elements.shape[0] // length * length
        if whole:
            rows = piece.elements[:whole].reshape(whole // length, length)
            views.setdefault(length, []).append(rows)
        if whole < piece.elements.shape[0]:
            rest.append(piece.elements[whole:])
    return [BlockTable(each) for each in views.values()], rest


def _columns(piece: ParameterSlice, spec: ParameterSpec) -> Array | None:
    """Return a view of a whole parameter's columns, [columns, length]; None if they are short.

    The matrix has the dimension that is outermost in memory and all others; its longer side is that
    of the columns. A vector is one column.
    """
    sides = [side for side in zip(spec.strides, spec.shape, strict=True) if side[1] > 1]
    outermost = max(sides)[1] if len(sides) > 1 else 1
    matrix = piece.elements.reshape(outermost, spec.count // outermost)
    if matrix.shape[0] > matrix.shape[1]:
        matrix = matrix.T
    return matrix if matrix.shape[1] >= _LEAST_COLUMN else None
