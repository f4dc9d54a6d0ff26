"""All-reduce of buffers."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence
from ctypes import memmove
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from hvdtrain.arrays import Array, namespace, of_type, to_float64
from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core.agreement.operation import Operation
from hvdtrain.core.agreement.request import UNNAMED, Request, Zeros
from hvdtrain.core.agreement.votes import Prepared
from hvdtrain.core.collectives.memory import device_details, device_types
from hvdtrain.engines.communicator import Communicator, Pieces
from hvdtrain.engines.features import Verdict, VotedReduction
from hvdtrain.types import DType, ReduceOp

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


# Copying larger buffers into a batch takes longer than reducing them one by one.
_TOGETHER_BYTES = 128 << 10


class Terms(NamedTuple):
    """What all-reduces have in common that differ only in their tensors."""

    op: ReduceOp
    prescale: float
    postscale: float
    batch_key: Hashable


def batch_key_of(
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
    return _key(op, dtype, prescale, postscale)


# Operations of one batch have one object as their key, which is compared sooner than tuples.
@lru_cache(maxsize=1024)
def _key(*terms: Hashable) -> Hashable:
    return terms


def engine_reduction(
    op: ReduceOp, dtype: DType, postscale: float, size: int
) -> tuple[ReduceOp, float, bool]:
    if op is not ReduceOp.AVERAGE:
        return op, postscale, False
    if dtype.is_integer:
        return ReduceOp.SUM, postscale, True
    return ReduceOp.SUM, postscale / size, False


_HIGHEST = (1 << 63) - 1


def divide_truncating(buffer: Buffer, divisor: int) -> None:
    """Divide integers in place, truncating towards zero."""
    if buffer.device == "cpu":
        _divide_array(cast("npt.NDArray[np.integer[Any]]", buffer.array()), divisor)
    elif buffer.dtype is DType.UINT64:
        _divide_bits(buffer.view(DType.INT64).elements(), divisor)
    else:
        # As int64, because torch does not divide all integer types.
        tensor: Any = buffer.elements()
        tensor.copy_(tensor.long().div_(divisor, rounding_mode="trunc"))


def _divide_array(array: npt.NDArray[np.integer[Any]], divisor: int) -> None:
    rounded_up = (array < 0) & (array % divisor != 0)  # // rounds down
    array //= divisor
    array[rounded_up] += 1


def _divide_bits(bits: Any, divisor: int) -> None:
    """Divide an int64 torch tensor with the bits of uint64, which torch does not divide."""
    quotient = ((bits >> 1) & _HIGHEST).div_(divisor, rounding_mode="trunc") << 1
    rest = bits - quotient * divisor
    bits.copy_(quotient + (rest >= divisor))


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

    @collective
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


# A framework's tensor or array.
_Tensor: TypeAlias = Any

# Source and result; they may be one.
Tensors: TypeAlias = tuple[_Tensor, _Tensor]


class PreparedAllreduce(Prepared):
    """The reduction of one tensor, prepared; its data are a pair of source and result."""

    def __init__(
        self,
        communicator: Communicator,
        example: _Tensor,
        shape: Sequence[int],
        op: ReduceOp,
        name: str,
        prescale: float,
        postscale: float,
        buffer_of: Callable[[_Tensor], Buffer],
        address_of: Callable[[_Tensor], int],
        next_name: Callable[[], str] | None,
        kind: str | None = None,
    ) -> None:
        self.buffer_of, self.address_of = buffer_of, address_of
        buffer = buffer_of(example)
        kinds = None if kind is None else [kind]
        first = Allreduce([buffer], [shape], op, name, prescale, postscale, kinds)
        super().__init__(first.request, next_name)
        self.terms, self.dtype, self.count = first.terms, buffer.dtype, buffer.count
        self._voted = _voted_reduction(communicator, buffer, op, prescale, postscale)

    def vote(self, communicator: Communicator, data: Tensors) -> Verdict:
        if self._voted is None:
            return super().vote(communicator, data)
        source, target = data
        return self._voted(self.ballot, self.address_of(source), self.address_of(target))

    def operation(self, data: Tensors) -> Allreduce:
        return _Repeated(self, self.request, data)

    def new_operation(self, data: Tensors) -> Allreduce:
        """Return the operation of a call of its own (in any thread)."""
        return _Repeated(self, self.next_request(), data)


class _Repeated(Allreduce):
    """The reduction of one tensor, which makes buffers of it only where they are needed."""

    def __init__(self, prepared: PreparedAllreduce, request: Request, data: Tensors) -> None:
        self.request, self.terms = request, prepared.terms
        self._prepared, self._data = prepared, data

    def pairs(self) -> Sequence[BufferPair]:
        (source, target), buffer_of = self._data, self._prepared.buffer_of
        buffer = buffer_of(target)
        return [(buffer if source is target else buffer_of(source), buffer)]

    def add_pieces(self, pieces: list[int]) -> None:
        (source, target), prepared = self._data, self._prepared
        address = prepared.address_of(target)
        read = address if source is target else prepared.address_of(source)
        pieces += (read, address, prepared.count)

    @property
    def dtype(self) -> DType:
        return self._prepared.dtype

    @property
    def nbytes(self) -> int:
        return self._prepared.count * self._prepared.dtype.itemsize


def _voted_reduction(
    communicator: Communicator, like: Buffer, op: ReduceOp, prescale: float, postscale: float
) -> VotedReduction | None:
    if op is ReduceOp.ADASUM or like.device != "cpu":
        return None
    dtype = like.dtype
    op, factor, divides = engine_reduction(op, dtype, postscale, communicator.size)
    if divides:
        return None
    return communicator.voted_reduction(like.count, dtype, op, prescale, factor)
