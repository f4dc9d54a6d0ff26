"""Quantized matrices as one message of bytes: bases and steps of all, then the codes of all."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.arrays import Array, as_bytes, concatenate, from_bytes, like_shape
from hvdtrain.core.compression.codes import encode, pack, unpack

__all__ = ["coded_bytes", "from_message", "to_message"]

# Messages lie one after the other in memory, and begin with numbers of up to 8 bytes.
_ALIGNMENT = 8


def coded_bytes(tables: Sequence[Array], bits: int) -> int:
    """Return the size of the message for matrices of these shapes.

    Args:
        tables: matrices, each [rows, length].
        bits: number of bits of a code.
    """
    sizes = [_factor_bytes(table) + _code_bytes(table, bits) for table in tables]
    return -(-sum(sizes) // _ALIGNMENT) * _ALIGNMENT


def to_message(tables: Sequence[Array], bits: int) -> Array:
    """Return the message that codes matrices, and leave in them what the codes lose.

    Args:
        tables: matrices, each [rows, length].
        bits: number of bits of a code.

    Returns:
        [coded_bytes(tables, bits)] uint8.
    """
    coded = [encode(table, bits) for table in tables]
    codes = [pack(each.reshape(-1), bits) for each, _ in coded]
    parts = [*(as_bytes(factors) for _, factors in coded), *codes]
    size = sum(part.shape[0] for part in parts)
    padding = like_shape(parts[0], (coded_bytes(tables, bits) - size,))
    padding[...] = 0
    return concatenate([*parts, padding])


def from_message(message: Array, tables: Sequence[Array], bits: int) -> list[tuple[Array, Array]]:
    """Return codes and factors of each matrix, as encode() does.

    Args:
        message: result of to_message() on any rank.
        tables: matrices of the same shapes and dtype.
        bits: number of bits of a code.
    """
    found, factors_at = [], 0
    codes_at = sum(_factor_bytes(table) for table in tables)
    for table in tables:
        factors_end = factors_at + _factor_bytes(table)
        codes_end = codes_at + _code_bytes(table, bits)
        factors = from_bytes(message[factors_at:factors_end], table)
        codes = unpack(message[codes_at:codes_end], bits, table.shape[0] * table.shape[1])
        found.append((codes.reshape(*table.shape), factors.reshape(table.shape[0], 2)))
        factors_at, codes_at = factors_end, codes_end
    return found


def _factor_bytes(table: Array) -> int:
    return table.shape[0] * 2 * table.itemsize


def _code_bytes(table: Array, bits: int) -> int:
    return -(-table.shape[0] * table.shape[1] * bits // 8)
