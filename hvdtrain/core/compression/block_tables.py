"""The elements of a slice as rows, each of which has a range of its own when it is quantized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from hvdtrain.arrays import Array, like_shape
from hvdtrain.core.gradients.exchange import FilledBucket, ParameterSlice
from hvdtrain.core.gradients.plan import ParameterSpec

__all__ = ["BlockTable", "block_tables"]

# Shorter columns are divided into blocks of this length.
_LEAST_COLUMN = 64
_COLUMN_BLOCK = 512


@dataclass(frozen=True)
class BlockTable:
    """Elements of parameters as rows of one length.

    Attributes:
        length: length of a row.
        views: views of the elements, each a whole number of rows, 1-d or 2-d.
    """

    length: int
    views: Sequence[Array]

    def rows(self) -> Array:
        """Return a copy of the elements, [rows, length]."""
        rows = like_shape(self.views[0], (sum(map(_size, self.views)) // self.length, self.length))
        for view, part in zip(self.views, self._parts(rows), strict=True):
            part[...] = view
        return rows

    def fill(self, rows: Array) -> None:
        """Overwrite the elements.

        Args:
            rows: new elements, contiguous, [rows, length].
        """
        for view, part in zip(self.views, self._parts(rows), strict=True):
            view[...] = part

    def _parts(self, rows: Array) -> list[Array]:
        """Return the rows of each view, in its shape."""
        flat, parts, first = rows.reshape(-1), [], 0
        for view in self.views:
            parts.append(flat[first : first + _size(view)].reshape(*view.shape))
            first += _size(view)
        return parts


def block_tables(
    bucket: FilledBucket, elements: Array, start: int, block: int
) -> tuple[list[BlockTable], list[Array]]:
    """Divide a slice of a bucket into rows, and into views of what fills no row.

    Args:
        bucket: bucket of the slice.
        elements: elements of the slice, 1-d.
        start: position of the slice in the bucket.
        block: length of a row; 0 for the columns of the parameters, which must then be whole.
    """
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
            views.setdefault(length, []).append(piece.elements[:whole])
        if whole < piece.elements.shape[0]:
            rest.append(piece.elements[whole:])
    return [BlockTable(length, each) for length, each in views.items()], rest


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


def _size(view: Array) -> int:
    return prod(view.shape)
