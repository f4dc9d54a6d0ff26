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

from typing import Any, cast

from hvdtrain.arrays import Array, like_shape, namespace, of_type

__all__ = ["BITS", "add_decoded", "decode", "encode", "pack", "unpack"]

BITS = (1, 2, 4, 8)
_DEVIATIONS = {2: 2.0, 4: 4.0, 8: 4.0}
# Rows are coded in parts that fit into the cache of a core.
_PART_ELEMENTS = 1 << 15


def encode(rows: Array, bits: int) -> tuple[Array, Array]:
    """Return the codes of each row, and leave in the rows what the codes lose.

    Args:
        rows: [rows, length], float32 or float64; overwritten with the error.
        bits: number of bits of a code, in BITS.

    Returns:
        Codes [rows, length] uint8, and bases and steps [rows, 2] in the dtype of the rows.
    """
    codes = like_shape(rows, rows.shape, "uint8")
    factors = like_shape(rows, (rows.shape[0], 2))
    for part in _parts(rows):
        own: Any = rows[part]
        codes[part], factors[part] = _two_values(own) if bits == 1 else _levels(own, bits)
        own -= _values(codes[part], factors[part])
    return codes, factors


def decode(codes: Array, factors: Array) -> Array:
    """Return the values of codes.

    Args:
        codes: [rows, length] uint8.
        factors: bases and steps, [rows, 2].

    Returns:
        [rows, length], in the dtype of the factors.
    """
    values = like_shape(factors, codes.shape)
    for part in _parts(codes):
        values[part] = _values(codes[part], factors[part])
    return values


def add_decoded(rows: Array, codes: Array, factors: Array) -> None:
    """Add the values of codes to rows.

    Args:
        rows: [rows, length], in the dtype of the factors.
        codes: [rows, length] uint8.
        factors: bases and steps, [rows, 2].
    """
    for part in _parts(rows):
        own: Any = rows[part]
        own += _values(codes[part], factors[part])


def pack(codes: Array, bits: int) -> Array:
    """Return codes with 8 / bits of them in a byte.

    Args:
        codes: 1-d uint8, less than 2^bits.
        bits: number of bits of a code, in BITS.

    Returns:
        [ceil(n * bits / 8)] uint8. The codes of a byte lie as far from each other as the result is
        long, so that whole arrays can be shifted.
    """
    if bits == 8:
        return codes
    in_byte = 8 // bits
    count = -(-codes.shape[0] // in_byte)
    if rest := count * in_byte - codes.shape[0]:
        zeros = like_shape(codes, (rest,))
        zeros[...] = 0
        codes = cast("Array", namespace(codes).concatenate([codes, zeros]))
    packed: Any = codes[:count] * 1
    for number in range(1, in_byte):
        part: Any = codes[number * count : (number + 1) * count]
        packed |= part << (number * bits)
    return cast("Array", packed)


def unpack(packed: Array, bits: int, count: int) -> Array:
    """Return the codes packed by pack().

    Args:
        packed: [ceil(n * bits / 8)] uint8.
        bits: number of bits of a code, in BITS.
        count: number of codes n.

    Returns:
        [n] uint8.
    """
    if bits == 8:
        return packed
    in_byte, width, given = 8 // bits, packed.shape[0], cast("Any", packed)
    codes = like_shape(packed, (in_byte * width,))
    for number in range(in_byte):
        codes[number * width : (number + 1) * width] = (given >> (number * bits)) & (2**bits - 1)
    return codes[:count]


def _parts(rows: Array) -> list[slice]:
    """Return the parts of some rows that fit into the cache."""
    count = max(1, _PART_ELEMENTS // rows.shape[1])
    return [slice(low, low + count) for low in range(0, rows.shape[0], count)]


def _values(codes: Array, factors: Array) -> Array:
    return codes * factors[:, 1:] + factors[:, :1]


def _two_values(rows: Any) -> tuple[Array, Array]:
    """Return codes and factors with 1 bit."""
    xp = namespace(rows)
    codes = rows >= 0
    upper = of_type(codes.sum(1), rows)
    total, magnitude = rows.sum(1), abs(rows).sum(1)
    # An empty class has the sum 0.
    high = (magnitude + total) / 2 / xp.clip(upper, 1, None)
    low = (total - magnitude) / 2 / xp.clip(rows.shape[1] - upper, 1, None)
    return codes, xp.stack([low, high - low], 1)


def _levels(rows: Any, bits: int) -> tuple[Array, Array]:
    """Return codes and factors with more than 1 bit."""
    xp = namespace(rows)
    outermost = 2 ** (bits - 1) - 1
    deviation = xp.sqrt((rows * rows).mean(1))
    step = deviation * (2 * _DEVIATIONS[bits] / (2**bits - 1))
    inverse = 1 / xp.where(step > 0, step, xp.ones_like(step))
    levels = xp.clip(xp.round(rows * inverse[:, None]), -outermost, outermost)
    codes = of_type(levels + outermost, like_shape(rows, (0,), "uint8"))
    return codes, xp.stack([-outermost * step, step], 1)
