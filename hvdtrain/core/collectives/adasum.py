"""Adasum: a sum of gradients that adapts to the angle between them (Maleki et al. 2020)."""

from __future__ import annotations

import math
import sys
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from hvdtrain.buffer import Buffer
from hvdtrain.engines.communicator import Communicator

__all__ = ["adasum", "combine"]

_NEGLIGIBLE = math.sqrt(sys.float_info.min)

Vector = npt.NDArray[np.floating[Any]]


def combine(a: Vector, b: Vector) -> Vector:
    """Return (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b, with float64 dot products.

    Orthogonal vectors are added, equal ones averaged. A vector whose square is negligible
    leaves the other one as it is.
    """
    wide_a, wide_b = a.astype(np.float64, copy=False), b.astype(np.float64, copy=False)
    dot, squared_a, squared_b = wide_a @ wide_b, wide_a @ wide_a, wide_b @ wide_b
    factor_a = 1.0 if squared_a < _NEGLIGIBLE else 1.0 - dot / (2 * squared_a)
    factor_b = 1.0 if squared_b < _NEGLIGIBLE else 1.0 - dot / (2 * squared_b)
    return (factor_a * wide_a + factor_b * wide_b).astype(a.dtype)


def adasum(
    communicator: Communicator, buffer: Buffer, prescale: float = 1.0, postscale: float = 1.0
) -> None:
    """Combine the members' buffers in place along a balanced binary tree over the ranks.

    Any number of members will do: one without a partner moves up a level unchanged. Every
    member computes the whole tree from the gathered buffers, so all get the same bits, at the
    price of memory for all of them.
    """
    buffer.scale(prescale)
    gathered = np.empty(buffer.count * communicator.size, buffer.dtype.numpy)
    counts = [buffer.count] * communicator.size
    communicator.allgather(buffer, Buffer.from_array(gathered, buffer.dtype), counts)
    level = cast("list[Vector]", list(gathered.reshape(communicator.size, -1)))
    while len(level) > 1:
        pairs = [combine(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        level = pairs + level[len(pairs) * 2 :]
    buffer.array()[:] = level[0]
    buffer.scale(postscale)
