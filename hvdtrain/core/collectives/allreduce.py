"""All-reduce of buffers."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from ctypes import memmove
from functools import lru_cache
from itertools import accumulate
from typing import cast

from hvdtrain.buffer import Buffer
from hvdtrain.core.agreement.operation import Operation
from hvdtrain.core.agreement.request import UNNAMED, Request, Zeros
from hvdtrain.core.collectives.adasum import adasum
from hvdtrain.core.collectives.devices import device_details, device_types
from hvdtrain.core.collectives.division import divide_truncating
from hvdtrain.engines.communicator import BufferPair, Communicator
from hvdtrain.types import DType, ReduceOp

__all__ = ["Allreduce", "engine_reduction"]

# Copying larger buffers into a batch takes longer than reducing them one by one.
_TOGETHER_BYTES = 128 << 10


class Allreduce(Operation):
    """Reduce buffers of all members in place.

    AVERAGE is postscale * sum_r(prescale * buffer_r) / size; for integers the quotient is
    truncated towards zero. ADASUM combines each buffer separately (see `adasum`).

    Args:
        buffers: memory of each tensor of a group, overwritten with the result.
        shapes: shapes of the tensors, hashable.
        op: reduction.
        name: name of the operation, equal on all members.
        prescale: factor before the reduction.
        postscale: factor after the reduction.
        kinds: element types of the user's tensors, if they differ from those of the buffers; equal
            on all members.
        sources: buffers of the elements; by default `buffers`.
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
        numbered = name.startswith(UNNAMED)
        request = _request(
            "" if numbered else name,
            op,
            tuple(shapes),
            tuple((buffer.count, buffer.dtype) for buffer in buffers),
            tuple(kinds or [buffer.dtype.value for buffer in buffers]),
            prescale,
            postscale,
            device_types(buffers),
        )
        self._set(
            request.renamed(name) if numbered else request,
            (op, prescale, postscale),
            buffers,
            sources or buffers,
            _batch_key(buffers, op, prescale, postscale),
        )

    @classmethod
    def repeated(
        cls, model: Allreduce, request: Request, source: Buffer, buffer: Buffer
    ) -> Allreduce:
        """Return an operation like an earlier one on a single tensor (local).

        Args:
            model: earlier operation.
            request: its request, perhaps with another number.
            source: elements, of the same type, number and device.
            buffer: memory for the result; may be `source`.
        """
        made = cls.__new__(cls)
        made._set(request, model._arguments, (buffer,), (source,), model._batch_key)
        return made

    def without_data(self) -> Allreduce:
        """Return a model for `repeated` that keeps no memory alive (local)."""
        made = Allreduce.__new__(Allreduce)
        made._set(self.request, self._arguments, (), (), self._batch_key)
        return made

    def _set(
        self,
        request: Request,
        arguments: tuple[ReduceOp, float, float],
        buffers: Sequence[Buffer],
        sources: Sequence[Buffer],
        batch_key: Hashable,
    ) -> None:
        super().__init__()
        self.request, self._arguments = request, arguments
        self._op, self._prescale, self._postscale = arguments
        self._buffers, self._sources, self._batch_key = buffers, sources, batch_key

    def execute(self, communicator: Communicator) -> None:
        for source, buffer in self.pairs():
            if self._op is ReduceOp.ADASUM:
                if source is not buffer:
                    buffer.copy_from(source)
                adasum(communicator, buffer, self._prescale, self._postscale)
            else:
                self._reduce(communicator, source, buffer)

    def pairs(self) -> Iterator[BufferPair]:
        """Return pairs of the source and the result of each tensor."""
        return zip(self._sources, self._buffers, strict=True)

    def batch_key(self) -> Hashable:
        return self._batch_key

    def execute_batch(
        self,
        others: Sequence[Operation],
        communicator: Communicator,
        memory: Buffer,
    ) -> None:
        operations = (self, *cast("Sequence[Allreduce]", others))
        pairs = [pair for operation in operations for pair in operation.pairs()]
        if self._reduce_all(communicator, pairs, memory):
            return
        for part in _fitting(pairs, memory.nbytes):
            self._reduce_together(communicator, part, memory)

    def _reduce_all(
        self, communicator: Communicator, pairs: Sequence[BufferPair], memory: Buffer
    ) -> bool:
        """Reduce in one call of the engine, if it has such a call."""
        dtype, size = pairs[0][1].dtype, communicator.size
        op, factor, divides = engine_reduction(self._op, dtype, self._postscale, size)
        if not communicator.allreduce_many(pairs, memory, op, self._prescale, factor):
            return False
        if divides:
            for _, buffer in pairs:
                divide_truncating(buffer, size)
        return True

    def _reduce_together(
        self,
        communicator: Communicator,
        pairs: Sequence[BufferPair],
        memory: Buffer,
    ) -> None:
        starts = [0, *accumulate(buffer.nbytes for _, buffer in pairs)]
        base = memory.pointer
        for (source, buffer), start in zip(pairs, starts, strict=False):
            memmove(base + start, source.pointer, buffer.nbytes)
        dtype = self._buffers[0].dtype
        whole = memory.slice(0, starts[-1]).view(dtype)
        self._reduce(communicator, whole, whole)
        for (_, buffer), start in zip(pairs, starts, strict=False):
            memmove(buffer.pointer, base + start, buffer.nbytes)

    def _reduce(self, communicator: Communicator, source: Buffer, buffer: Buffer) -> None:
        size = communicator.size
        op, factor, whole = engine_reduction(self._op, buffer.dtype, self._postscale, size)
        if source is buffer:
            communicator.allreduce(buffer, op, self._prescale, factor)
        else:
            communicator.allreduce_from(source, buffer, op, self._prescale, factor)
        if whole:
            divide_truncating(buffer, size)


def _batch_key(
    buffers: Sequence[Buffer], op: ReduceOp, prescale: float, postscale: float
) -> Hashable:
    dtype = buffers[0].dtype
    # Factors truncate each integer, for which engines have no call on many tensors.
    factors = dtype.is_integer and (prescale, postscale) != (1.0, 1.0)
    if (
        factors
        or op is ReduceOp.ADASUM
        or any(
            b.dtype is not dtype or b.nbytes > _TOGETHER_BYTES or b.device != "cpu" for b in buffers
        )
    ):
        return None
    return op, dtype, prescale, postscale


def engine_reduction(
    op: ReduceOp, dtype: DType, postscale: float, size: int
) -> tuple[ReduceOp, float, bool]:
    """Return how an engine computes a reduction.

    Args:
        op: reduction, except ADASUM.
        dtype: element type.
        postscale: factor after the reduction.
        size: number of members.

    Returns:
        The engine's reduction, its factor, and whether its result must be divided by `size`.
    """
    if op is not ReduceOp.AVERAGE:
        return op, postscale, False
    if dtype.is_integer:
        return ReduceOp.SUM, postscale, True
    return ReduceOp.SUM, postscale / size, False


def _fitting(pairs: Sequence[BufferPair], nbytes: int) -> Iterator[list[BufferPair]]:
    """Split a list of pairs into lists of at most `nbytes` each."""
    part: list[BufferPair] = []
    room = nbytes
    for pair in pairs:
        if pair[1].nbytes > room:
            yield part
            part, room = [], nbytes
        part.append(pair)
        room -= pair[1].nbytes
    yield part


# A training loop submits the same requests again and again.
@lru_cache(maxsize=1024)
def _request(
    name: str,
    op: ReduceOp,
    shapes: tuple[Sequence[int], ...],
    zeros: tuple[tuple[int, DType], ...],
    kinds: tuple[str, ...],
    prescale: float,
    postscale: float,
    devices: tuple[str, ...],
) -> Request:
    return Request(
        "allreduce",
        name,
        (
            ("op", op.value),
            ("shape", ", ".join(str(tuple(shape)) for shape in shapes)),
            ("dtype", ", ".join(kinds)),
            ("prescale", repr(float(prescale))),
            ("postscale", repr(float(postscale))),
            *device_details(devices),
        ),
        Zeros(zeros, op, prescale, postscale, devices),
    )
