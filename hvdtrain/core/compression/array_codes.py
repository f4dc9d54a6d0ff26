"""Codes of few bits with operations on whole arrays, for devices and where no kernel is.

codes_kernel.c gives the same bits as these functions with numpy.
"""

from __future__ import annotations

from typing import Any, cast

from hvdtrain.arrays import Array, like_shape, namespace, of_type, zeros_like
from hvdtrain.core.compression.layout import row_bytes

_DEVIATIONS = {2: 2.0, 4: 4.0, 8: 4.0}
# Rows are coded in parts that fit into the cache of a core.
_PART_ELEMENTS = 1 << 15


def encode(rows: Array, factors: Array, codes: Array, bits: int) -> None:
    """See codes.encode()."""
    for part in _parts(rows):
        own: Any = rows[part]
        levels, factors[part] = _two_values(own) if bits == 1 else _levels(own, bits)
        codes[part] = _packed(levels, bits)
        own -= _values(levels, factors[part])


def decode(rows: Array, factors: Array, codes: Array, bits: int) -> None:
    """See codes.decode()."""
    for part in _parts(rows):
        rows[part] = _values(_unpacked(codes[part], bits, rows.shape[1]), factors[part])


def add_decoded(rows: Array, factors: Array, codes: Array, bits: int) -> None:
    """See codes.add_decoded()."""
    for part in _parts(rows):
        own: Any = rows[part]
        own += _values(_unpacked(codes[part], bits, rows.shape[1]), factors[part])


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
    return of_type(codes, _byte(rows)), xp.stack([low, high - low], 1)


def _levels(rows: Any, bits: int) -> tuple[Array, Array]:
    """Return codes and factors with more than 1 bit."""
    xp = namespace(rows)
    outermost = 2 ** (bits - 1) - 1
    deviation = xp.sqrt((rows * rows).sum(1) / rows.shape[1])
    step = deviation * (2 * _DEVIATIONS[bits] / (2**bits - 1))
    inverse = 1 / xp.where(step > 0, step, xp.ones_like(step))
    levels = xp.clip(xp.round(rows * inverse[:, None]), -outermost, outermost)
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
