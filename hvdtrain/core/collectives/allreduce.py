"""All-reduce of buffers."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence
from ctypes import memmove
from functools import lru_cache, partial
from itertools import accumulate
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt

from hvdtrain.buffer import Buffer
from hvdtrain.core.agreement.operation import Operation
from hvdtrain.core.agreement.request import UNNAMED, Request, Zeros
from hvdtrain.core.collectives.adasum import adasum
from hvdtrain.core.collectives.allreduce_terms import Terms, batch_key_of, engine_reduction
from hvdtrain.core.collectives.devices import device_details, device_types
from hvdtrain.core.collectives.division import divide_truncating
from hvdtrain.engines.communicator import Communicator, Pieces
from hvdtrain.types import DType, ReduceOp

# Elements to reduce, and the memory for the result.
BufferPair: TypeAlias = tuple[Buffer, Buffer]


class Allreduce(Operation):
    """Reduce buffers of all members in place.

    AVERAGE is postscale * sum_r(prescale * buffer_r) / size; for integers the quotient is
    truncated towards zero. ADASUM combines each buffer separately (see `adasum`).
    """

    terms: Terms

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
        self.request = request.renamed(name) if numbered else request
        self.terms = Terms(op, prescale, postscale, batch_key_of(buffers, op, prescale, postscale))
        self._buffers, self._sources = buffers, sources or buffers

    def execute(self, communicator: Communicator) -> None:
        terms = self.terms
        grouped = len(self._buffers) > 1 and terms.batch_key is not None
        if grouped and self._reduce_all((self,), communicator.size, communicator.allreduce_many):
            return
        for source, buffer in self.pairs():
            if terms.op is ReduceOp.ADASUM:
                if source is not buffer:
                    buffer.copy_from(source)
                adasum(communicator, buffer, terms.prescale, terms.postscale)
            else:
                self._reduce(communicator, source, buffer)

    def pairs(self) -> Sequence[BufferPair]:
        """Return pairs of the source and the result of each tensor."""
        return list(zip(self._sources, self._buffers, strict=True))

    def add_pieces(self, pieces: list[int]) -> None:
        """Append, as in `Pieces`, where source and result of each tensor are in host memory."""
        for source, buffer in self.pairs():
            pieces.extend((source.pointer, buffer.pointer, buffer.count))

    def batch_key(self) -> Hashable:
        return self.terms.batch_key

    def execute_batch(
        self,
        others: Sequence[Operation],
        communicator: Communicator,
        allocate: Callable[[], Buffer],
    ) -> None:
        operations = (self, *cast("Sequence[Allreduce]", others))
        if self._reduce_all(operations, communicator.size, communicator.allreduce_many):
            return
        memory = allocate()
        pairs = [pair for operation in operations for pair in operation.pairs()]
        for part in _fitting(pairs, memory.nbytes):
            self._reduce_together(communicator, part, memory)

    def vote_on_batch(
        self,
        others: Sequence[Operation],
        communicator: Communicator,
        votes: npt.NDArray[np.uint64],
    ) -> bool:
        operations = (self, *cast("Sequence[Allreduce]", others))
        vote = partial(communicator.vote_on_many, votes)
        return self._reduce_all(operations, communicator.size, vote)

    def _reduce_all(
        self,
        operations: Sequence[Allreduce],
        size: int,
        reduce: Callable[[Pieces, DType, ReduceOp, float, float], bool],
    ) -> bool:
        """Reduce operations in one call of the engine; return whether it has done so."""
        terms, dtype = self.terms, self.dtype
        op, factor, divides = engine_reduction(terms.op, dtype, terms.postscale, size)
        numbers: list[int] = []
        for operation in operations:
            operation.add_pieces(numbers)
        if not reduce(array("q", numbers), dtype, op, terms.prescale, factor):
            return False
        if divides:
            for operation in operations:
                for _, buffer in operation.pairs():
                    divide_truncating(buffer, size)
        return True

    @property
    def dtype(self) -> DType:
        """The element type of the first tensor."""
        return self._buffers[0].dtype

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
        whole = memory.slice(0, starts[-1]).view(self.dtype)
        self._reduce(communicator, whole, whole)
        for (_, buffer), start in zip(pairs, starts, strict=False):
            memmove(buffer.pointer, base + start, buffer.nbytes)

    def _reduce(self, communicator: Communicator, source: Buffer, buffer: Buffer) -> None:
        size, terms = communicator.size, self.terms
        op, factor, whole = engine_reduction(terms.op, buffer.dtype, terms.postscale, size)
        if source is buffer:
            communicator.allreduce(buffer, op, terms.prescale, factor)
        else:
            communicator.allreduce_from(source, buffer, op, terms.prescale, factor)
        if whole:
            divide_truncating(buffer, size)


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
