"""Where the codes of a row lie."""

from __future__ import annotations

BITS = (1, 2, 4, 8)


def row_bytes(length: int, bits: int) -> int:
    """Return the number of bytes of a row's codes.

    The codes of a byte lie as far from each other as the row has bytes, so that those of
    neighboring elements are made and read together.
    """
    return -(-length * bits // 8)
