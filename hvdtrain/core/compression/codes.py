"""Numbers as codes of few bits, each row of a matrix with a range of its own.

A code q of a row stands for base + step * q:

- 1 bit: q is the sign, and the two values are the means of the negative and of the other elements
  (CNTK's zero threshold);
- more bits: 2^bits - 1 levels at equal distances around 0, over a range of 4 standard deviations to
  each side, or 2 for 2 bits. Elements outside get the outermost level.

The standard deviation is that around 0. CNTK has the range of 4 for 2 bits, too, which loses more
of a normal distribution than 1 bit does, and sends nothing of elements of one magnitude.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hvdtrain.arrays import Array, contiguous
from hvdtrain.core.compression import array_codes
from hvdtrain.core.compression.kernel import with_kernel


def encode(rows: Array, factors: Array, codes: Array, bits: int) -> None:
    """Code each row, and leave in the rows what the codes lose.

    Args:
        rows: [rows, length], float32 or float64, of any strides; overwritten with the error.
        factors: overwritten with bases and steps, [rows, 2], contiguous, in the dtype of the rows.
        codes: overwritten with the codes, [rows, row_bytes(length, bits)] uint8, contiguous.
    """
    with _contiguous(rows) as own:
        if not with_kernel("encode", own, factors, codes, bits):
            array_codes.encode(own, factors, codes, bits)


def decode(rows: Array, factors: Array, codes: Array, bits: int) -> None:
    """Overwrite rows with the values of codes.

    Args:
        rows: [rows, length], in the dtype of the factors, of any strides.
    """
    with _contiguous(rows) as own:
        if not with_kernel("decode", own, factors, codes, bits):
            array_codes.decode(own, factors, codes, bits)


def add_decoded(rows: Array, factors: Array, codes: Array, bits: int) -> None:
    """Add the values of codes to rows; see decode()."""
    with _contiguous(rows) as own:
        if not with_kernel("add_decoded", own, factors, codes, bits):
            array_codes.add_decoded(own, factors, codes, bits)


@contextmanager
def _contiguous(rows: Array) -> Iterator[Array]:
    """Give rows, or a copy that is contiguous and overwrites them at the end."""
    own = contiguous(rows)
    yield own
    if own is not rows:
        rows[...] = own
