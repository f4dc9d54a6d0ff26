"""Numbers as codes of few bits, each row of a matrix with a range of its own.

A code q of a row stands for base + step * q:

- 1 bit: q is the sign, and the two values are the means of the negative and of the other elements
  (CNTK's zero threshold);
- 4 and 8 bits: 2^bits - 1 levels at equal distances around 0, up to the largest magnitude;
- 2 bits: three levels, over 2 standard deviations (around 0) to each side. Elements outside get the
  outermost level.

CNTK has a range of 4 standard deviations to each side. Few elements of a gradient are far outside,
and lose more with 8 bits than all others (of a transformer's gradients 80 to 330 times as much).
With 2 bits that range loses more of a normal distribution than 1 bit does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from ctypes import POINTER, Structure, c_int32, c_int64, c_uint64
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

from hvdtrain.arrays import (
    Array,
    buffer_of,
    contiguous,
    from_bytes,
    like_shape,
    namespace,
    of_type,
    zeros_like,
)
from hvdtrain.compiled import load_or_report, open_library
from hvdtrain.core.gradients.exchange import FilledBucket, ParameterSlice
from hvdtrain.core.gradients.plan import ParameterSpec
from hvdtrain.types import DType

BITS = (1, 2, 4, 8)


def row_bytes(length: int, bits: int) -> int:
    """Return the number of bytes of a row's codes.

    The codes of a byte lie as far from each other as the row has bytes, so that those of
    neighboring elements are made and read together.
    """
    return -(-length * bits // 8)


# The distance of the levels of 2 bits, in standard deviations.
_STEP_OF_TWO = 4 / 3
# Rows are coded in parts that fit into the cache of a core.
_PART_ELEMENTS = 1 << 15


def code_arrays(call: str, rows: Array, factors: Array, codes: Array, bits: int) -> None:
    """Do with numpy or torch what code() does."""
    for part in _parts(rows):
        own: Any = rows[part]
        if call == "encode":
            levels, factors[part] = _two_values(own) if bits == 1 else _levels(own, bits)
            codes[part] = _packed(levels, bits)
            own -= _values(levels, factors[part])
            continue
        values = _values(_unpacked(codes[part], bits, rows.shape[1]), factors[part])
        if call == "decode":
            own[...] = values
        else:
            own += values


def _parts(rows: Array) -> list[slice]:
    """Return the parts of some rows that fit into the cache."""
    count = max(1, _PART_ELEMENTS // rows.shape[1])
    return [slice(low, low + count) for low in range(0, rows.shape[0], count)]


def _values(codes: Array, factors: Array) -> Array:
    return codes * factors[:, 1:] + factors[:, :1]


def _two_values(rows: Any) -> tuple[Array, Array]:
    xp = namespace(rows)
    codes = rows >= 0
    upper = of_type(codes.sum(1), rows)
    total, magnitude = rows.sum(1), abs(rows).sum(1)
    # An empty class has the sum 0.
    high = (magnitude + total) / 2 / xp.clip(upper, 1, None)
    low = (total - magnitude) / 2 / xp.clip(rows.shape[1] - upper, 1, None)
    return of_type(codes, _byte(rows)), xp.stack([low, high - low], 1)


def _levels(rows: Any, bits: int) -> tuple[Array, Array]:
    xp = namespace(rows)
    outermost = 2 ** (bits - 1) - 1
    if bits == 2:
        step = xp.sqrt((rows * rows).sum(1) / rows.shape[1]) * _STEP_OF_TWO
    else:
        step = xp.amax(abs(rows), 1) / outermost
    divisor = xp.where(step > 0, step, xp.ones_like(step))  # an inverse may be infinite
    levels = xp.clip(xp.round(rows / divisor[:, None]), -outermost, outermost)
    return of_type(levels + outermost, _byte(rows)), xp.stack([-outermost * step, step], 1)


def _byte(model: Array) -> Array:
    return like_shape(model, (0,), "uint8")


def _packed(codes: Array, bits: int) -> Array:
    """Return the codes of rows, [rows, length] uint8, as [rows, row_bytes()] uint8."""
    width, length = row_bytes(codes.shape[1], bits), codes.shape[1]
    packed = zeros_like(codes[:, :width])
    for number, low in enumerate(range(0, length, width)):
        part: Any = codes[:, low : low + width]
        into: Any = packed[:, : part.shape[1]]
        into |= part << (number * bits)
    return packed


def _unpacked(packed: Array, bits: int, length: int) -> Array:
    """Return the codes of rows, [rows, length] uint8."""
    codes, width = like_shape(packed, (packed.shape[0], length)), packed.shape[1]
    for number, low in enumerate(range(0, length, width)):
        high = min(low + width, length)
        part = cast("Any", packed)[:, : high - low]
        codes[:, low:high] = (part >> (number * bits)) & (2**bits - 1)
    return codes


_SOURCE = Path(__file__).with_name("codes_kernel.c")
_CALLS = ("encode", "decode", "add_decoded")
_MODULE = "hvdtrain.core.exchanges._codes_kernel"


class _Table(Structure):
    """table_t of codes_kernel.c: rows of one length, and their codes."""

    _fields_ = (
        ("rows", c_uint64),
        ("factors", c_uint64),
        ("codes", c_uint64),
        ("count", c_int64),
        ("length", c_int64),
        ("bits", c_int32),
        ("is_double", c_int32),
    )


@cache
def load_kernel() -> ctypes.CDLL | None:
    """Return the library, or None if there is no usable one; the log says why."""
    without = "gradients are coded with numpy"
    return load_or_report(_MODULE, _SOURCE.parent, open_kernel, without)


def open_kernel(path: Path | None) -> ctypes.CDLL:
    library = open_library(path, _SOURCE)
    for call in _CALLS:
        function = getattr(library, f"hvd_{call}")
        function.restype, function.argtypes = None, [POINTER(_Table)]
    return library


def with_kernel(call: str, rows: Array, factors: Array, codes: Array, bits: int) -> bool:
    """Call the kernel on contiguous float32 or float64 rows; return False if there is none."""
    memory = buffer_of(rows)
    library = load_kernel() if memory.device == "cpu" else None
    if library is None:
        return False
    table = _Table(
        memory.pointer,
        buffer_of(factors).pointer,
        buffer_of(codes).pointer,
        *rows.shape,
        bits,
        memory.dtype is DType.FLOAT64,
    )
    getattr(library, f"hvd_{call}")(table)
    return True


# Shorter columns are divided into blocks of this length.
_LEAST_COLUMN = 64
_COLUMN_BLOCK = 512


@dataclass(frozen=True)
class BlockTable:
    """Views of parameters' elements as rows of one length, [rows, length] each, of any strides."""

    views: Sequence[Array]

    @property
    def count(self) -> int:
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


def code(call: str, rows: Array, factors: Array, codes: Array, bits: int) -> None:
    """Encode, decode or add the codes of each row [length], of any strides.

    To "encode" leaves in the rows what the codes lose, to "decode" overwrites them with the values
    of codes, and "add_decoded" adds these. Rows are float32 or float64. Factors, [rows, 2] bases
    and steps in the dtype of the rows, and codes, [rows, row_bytes(length, bits)] uint8, are
    contiguous.
    """
    own = contiguous(rows)
    if not with_kernel(call, own, factors, codes, bits):
        code_arrays(call, own, factors, codes, bits)
    if own is not rows:
        rows[...] = own


# Messages lie one after the other in memory, and begin with numbers of up to 8 bytes.
_ALIGNMENT = 8


def coded_bytes(tables: Sequence[Array], bits: int) -> int:
    """Return the size of the message for matrices [rows, length]."""
    return -(-sum(map(sum, _sizes(tables, bits))) // _ALIGNMENT) * _ALIGNMENT


def code_message(call: str, message: Array, tables: Sequence[Array], bits: int) -> None:
    """Call code() for matrices and their codes in a message, [coded_bytes()] uint8."""
    sizes = list(_sizes(tables, bits))
    factors_at, codes_at = 0, sum(factors for factors, _ in sizes)
    for table, (factors, codes) in zip(tables, sizes, strict=True):
        rows = table.shape[0]
        code(
            call,
            table,
            from_bytes(message[factors_at : factors_at + factors], table).reshape(rows, 2),
            message[codes_at : codes_at + codes].reshape(rows, codes // rows),
            bits,
        )
        factors_at, codes_at = factors_at + factors, codes_at + codes
    if call == "encode":
        message[codes_at:] = 0


def _sizes(tables: Sequence[Array], bits: int) -> Iterator[tuple[int, int]]:
    """Yield the number of bytes of each matrix's factors, and of its codes."""
    for table in tables:
        rows, length = table.shape
        yield rows * 2 * table.itemsize, rows * row_bytes(length, bits)
