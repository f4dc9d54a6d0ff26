"""Matrices as one message of bytes: bases and steps of all their rows, then the codes of all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hvdtrain.arrays import Array, from_bytes
from hvdtrain.core.compression.codes import add_decoded, decode, encode
from hvdtrain.core.compression.layout import row_bytes

# Messages lie one after the other in memory, and begin with numbers of up to 8 bytes.
_ALIGNMENT = 8


def coded_bytes(tables: Sequence[Array], bits: int) -> int:
    """Return the size of the message for matrices of these shapes.

    Args:
        tables: matrices, each [rows, length].
    """
    return -(-sum(map(sum, _sizes(tables, bits))) // _ALIGNMENT) * _ALIGNMENT


def to_message(message: Array, tables: Sequence[Array], bits: int) -> None:
    """Write the codes of matrices, and leave in the matrices what the codes lose.

    Args:
        message: overwritten, [coded_bytes(tables, bits)] uint8.
        tables: matrices, each [rows, length].
    """
    message[sum(map(sum, _sizes(tables, bits))) :] = 0
    for table, factors, codes in _parts(message, tables, bits):
        encode(table, factors, codes, bits)


def read_message(message: Array, tables: Sequence[Array], bits: int) -> None:
    """Overwrite matrices with what a message stands for."""
    for table, factors, codes in _parts(message, tables, bits):
        decode(table, factors, codes, bits)


def add_message(message: Array, tables: Sequence[Array], bits: int) -> None:
    """Add what a message stands for to matrices; see read_message()."""
    for table, factors, codes in _parts(message, tables, bits):
        add_decoded(table, factors, codes, bits)


def _parts(
    message: Array, tables: Sequence[Array], bits: int
) -> Iterator[tuple[Array, Array, Array]]:
    """Yield each matrix with views of its factors and of its codes in the message."""
    sizes = list(_sizes(tables, bits))
    factors_at, codes_at = 0, sum(factors for factors, _ in sizes)
    for table, (factors, codes) in zip(tables, sizes, strict=True):
        rows = table.shape[0]
        yield (
            table,
            from_bytes(message[factors_at : factors_at + factors], table).reshape(rows, 2),
            message[codes_at : codes_at + codes].reshape(rows, codes // rows),
        )
        factors_at, codes_at = factors_at + factors, codes_at + codes


def _sizes(tables: Sequence[Array], bits: int) -> Iterator[tuple[int, int]]:
    """Yield the number of bytes of each matrix's factors, and of its codes."""
    for table in tables:
        rows, length = table.shape
        yield rows * 2 * table.itemsize, rows * row_bytes(length, bits)
