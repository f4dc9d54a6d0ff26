"""Reduction of buffers in place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from hvdtrain.buffer import Buffer
from hvdtrain.core.channel import Operation
from hvdtrain.core.collectives.adasum import adasum
from hvdtrain.core.request import Request, Zeros
from hvdtrain.engines.communicator import Communicator
from hvdtrain.types import DType, ReduceOp

__all__ = ["Allreduce", "divide_truncating"]


class Allreduce(Operation):
    """Reduce buffers of every member in place.

    AVERAGE is postscale * sum_r(prescale * buffer_r) / size; for integers the quotient is
    truncated towards zero. ADASUM combines each buffer for itself (see `adasum`).

    Args:
        buffers: one, or the members of a group; overwritten with the result.
        shapes: for each the tensor's shape, hashable.
        op: the reduction.
        name: equal on all members.
        prescale: factor before the reduction.
        postscale: factor after it.
        kinds: the tensors' own types, where they are reduced in another; equal on all members.
        sources: for each buffer where its elements come from, if not from itself.
    """

    def __init__(
        self,
        buffers: Sequence[Buffer],
        shapes: Sequence[Sequence[int]],
        op: ReduceOp,
        name: str,
        prescale: float = 1.0,
        postscale: float = 1.0,
        kinds: Sequence[str] | None = None,
        sources: Sequence[Buffer] | None = None,
    ) -> None:
        super().__init__()
        self._buffers, self._op = buffers, op
        self._sources = sources or buffers
        self._prescale, self._postscale = prescale, postscale
        self.request = _request(
            name,
            op,
            tuple(shapes),
            tuple((buffer.count, buffer.dtype) for buffer in buffers),
            tuple(kinds or [buffer.dtype.value for buffer in buffers]),
            prescale,
            postscale,
        )

    def execute(self, communicator: Communicator) -> None:
        for source, buffer in zip(self._sources, self._buffers, strict=True):
            if self._op is ReduceOp.ADASUM:
                if source is not buffer:
                    buffer.array()[:] = source.array()
                adasum(communicator, buffer, self._prescale, self._postscale)
            else:
                self._reduce(communicator, source, buffer)

    def _reduce(self, communicator: Communicator, source: Buffer, buffer: Buffer) -> None:
        op, factor = self._op, self._postscale
        whole = op is ReduceOp.AVERAGE and buffer.dtype.is_integer
        if op is ReduceOp.AVERAGE:
            op = ReduceOp.SUM
            if not whole:
                factor /= communicator.size
        if source is buffer:
            communicator.allreduce(buffer, op, self._prescale, factor)
        else:
            communicator.allreduce_from(source, buffer, op, self._prescale, factor)
        if whole:
            divide_truncating(buffer, communicator.size)


# A training loop asks for the same thing again and again.
@lru_cache(maxsize=1024)
def _request(
    name: str,
    op: ReduceOp,
    shapes: tuple[Sequence[int], ...],
    zeros: tuple[tuple[int, DType], ...],
    kinds: tuple[str, ...],
    prescale: float,
    postscale: float,
) -> Request:
    return Request(
        "allreduce",
        name,
        (
            ("op", op.value),
            ("shape", ", ".join(str(tuple(shape)) for shape in shapes)),
            ("dtype", ", ".join(kinds)),
            ("prescale", repr(prescale)),
            ("postscale", repr(postscale)),
        ),
        Zeros(zeros, op, postscale),
    )


def divide_truncating(buffer: Buffer, divisor: int) -> None:
    """Divide integers in place, truncating towards zero."""
    array = cast("npt.NDArray[np.integer[Any]]", buffer.array())
    rounded_up = (array < 0) & (array % divisor != 0)  # // rounds down
    array //= divisor
    array[rounded_up] += 1
