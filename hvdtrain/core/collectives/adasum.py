"""Adasum: a sum of gradients that adapts to the angle between them (Maleki et al. 2020)."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import cast

import numpy as np

from hvdtrain.arrays import Array, namespace, of_type, to_float64
from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.engines.communicator import Communicator

_NEGLIGIBLE = math.sqrt(sys.float_info.min)


def combine(a: Array, b: Array) -> Array:
    """Return (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b, with float64 dot products.

    Orthogonal vectors are added, equal ones averaged. A vector whose square is negligible leaves
    the other one unchanged.
    """
    wide_a, wide_b = to_float64(a), to_float64(b)
    dot = wide_a @ wide_b
    factor_a, factor_b = _factor(dot, wide_a @ wide_a), _factor(dot, wide_b @ wide_b)
    return of_type(wide_a * factor_a + wide_b * factor_b, a)


def _factor(dot: Array, squared: Array) -> Array:
    # Without reading values from a device, which would make the host wait for it.
    with np.errstate(all="ignore"):
        factor = 1.0 - dot / (squared * 2)
    return cast("Array", namespace(squared).where(squared < _NEGLIGIBLE, 1.0, factor))


@collective
def adasum(
    communicator: Communicator,
    buffer: Buffer,
    prescale: float = 1.0,
    postscale: float = 1.0,
    parts: Sequence[tuple[int, int]] | None = None,
) -> None:
    """Combine the members' buffers in place along a balanced binary tree.

    The number of members is arbitrary: one without a partner moves up a level unchanged. Every
    member computes the whole tree from the gathered buffers, so that all get the same bits, at the
    cost of memory for all buffers.
    """
    buffer.scale(prescale)
    size, count = communicator.size, buffer.count
    gathered = buffer.like(count * size)
    communicator.allgather(buffer, gathered, [count] * size)
    for start, length in [(0, count)] if parts is None else parts:
        vectors = [_elements(gathered.slice(r * count + start, length)) for r in range(size)]
        _elements(buffer.slice(start, length))[...] = _tree(vectors)
    buffer.scale(postscale)


def _tree(level: list[Array]) -> Array:
    while len(level) > 1:
        pairs = [combine(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0]


def _elements(buffer: Buffer) -> Array:
    """Return a view of the elements: on the host by numpy, for the same bits with all engines."""
    return cast("Array", buffer.array() if buffer.device == "cpu" else buffer.elements())
