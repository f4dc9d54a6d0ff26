"""All-reduce of buffers."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from ctypes import memmove
from functools import lru_cache
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core.agreement.driver import HASHES
from hvdtrain.core.agreement.operation import (
    UNNAMED,
    Operation,
    Request,
    Zeros,
    device_details,
    device_types,
)
from hvdtrain.engines.communicator import Communicator, VoteCalls, VotedReduction
from hvdtrain.streams import HOST
from hvdtrain.types import DType, ReduceOp

if TYPE_CHECKING:
    from hvdtrain.arrays import Array  # for Adasum

_NEGLIGIBLE = math.sqrt(sys.float_info.min)


def combine(a: Array, b: Array) -> Array:
    """Return (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b, with float64 dot products.

    Orthogonal vectors are added, equal ones averaged. A vector whose square is negligible leaves
    the other one unchanged.
    """
    from hvdtrain.arrays import of_type, to_float64

    wide_a, wide_b = to_float64(a), to_float64(b)
    dot = wide_a @ wide_b
    factor_a, factor_b = _factor(dot, wide_a @ wide_a), _factor(dot, wide_b @ wide_b)
    return of_type(wide_a * factor_a + wide_b * factor_b, a)


def _factor(dot: Array, squared: Array) -> Array:
    from hvdtrain.arrays import namespace

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
        _divide_array(cast("np.typing.NDArray[np.integer[Any]]", buffer.array()), divisor)
    elif buffer.dtype is DType.UINT64:
        _divide_bits(buffer.view(DType.INT64).elements(), divisor)
    else:
        # As int64, because torch does not divide all integer types.
        tensor: Any = buffer.elements()
        tensor.copy_(tensor.long().div_(divisor, rounding_mode="trunc"))


def _divide_array(array: np.typing.NDArray[np.integer[Any]], divisor: int) -> None:
    rounded_up = (array < 0) & (array % divisor != 0)  # // rounds down
    array //= divisor
    array[rounded_up] += 1


def _divide_bits(bits: Any, divisor: int) -> None:
    """Divide an int64 torch tensor with the bits of uint64, which torch does not divide."""
    quotient = ((bits >> 1) & _HIGHEST).div_(divisor, rounding_mode="trunc") << 1
    rest = bits - quotient * divisor
    bits.copy_(quotient + (rest >= divisor))


# Elements to reduce, and the memory for the result; they may be one.
BufferPair: TypeAlias = tuple[Buffer, Buffer]


class AllreduceTemplate:
    """What all-reduces of one communicator have in common that differ in their data.

    The request has no name if they are numbered.
    """

    def __init__(
        self,
        buffers: Sequence[Buffer],
        shapes: Sequence[Sequence[int]],
        op: ReduceOp,
        name: str,
        prescale: float,
        postscale: float,
        kinds: Sequence[str] | None = None,
    ) -> None:
        self.op, self.prescale, self.postscale = op, prescale, postscale
        self.dtype = buffers[0].dtype
        self.counts = [buffer.count for buffer in buffers]
        self.kinds = tuple((buffer.count, buffer.dtype) for buffer in buffers)
        self.request = _request(
            "" if name.startswith(UNNAMED) else name,
            op,
            tuple(shapes),
            self.kinds,
            tuple(kinds or [buffer.dtype.value for buffer in buffers]),
            prescale,
            postscale,
            device_types(buffers),
        )
        # Adasum combines each buffer separately.
        on_host = op is not ReduceOp.ADASUM and all(buffer.device == "cpu" for buffer in buffers)
        # Factors truncate each integer, for which engines have no call on many tensors.
        factors = self.dtype.is_integer and (prescale, postscale) != (1.0, 1.0)
        together = (
            on_host
            and not factors
            and all(
                buffer.dtype is self.dtype and buffer.nbytes <= _TOGETHER_BYTES
                for buffer in buffers
            )
        )
        self.batch_key = _key(op, self.dtype, prescale, postscale) if together else None
        self._may_be_voted = together or (len(buffers) == 1 and on_host)
        self.voted: VotedReduction | None = None
        self.vote_calls: VoteCalls | None = None
        self.divides = op is ReduceOp.AVERAGE and self.dtype.is_integer

    def find_voted(self, communicator: Communicator) -> VotedReduction | None:
        """Return the engine's call that votes on these operations and runs them, if it has one."""
        if self._may_be_voted:
            size = communicator.size
            op, factor, _ = engine_reduction(self.op, self.dtype, self.postscale, size)
            self.voted = communicator.voted_reduction(self.dtype, op, self.prescale, factor)
            self._may_be_voted = self.voted is not None
            if self.voted is not None and len(self.counts) == 1 and not self.divides:
                self.vote_calls = self.voted.calls(self.counts[0])
        return self.voted

    @collective
    def finish(self, verdict: int) -> bytes:
        assert self.voted is not None
        return self.voted.finish(verdict)

    def operation(
        self, name: str, source: Any, target: Any, read: int, written: int
    ) -> TemplateAllreduce:
        buffer = Buffer(written, self.dtype, self.counts[0], "cpu", target)
        own = buffer
        if source is not target:
            own = Buffer(read, self.dtype, self.counts[0], "cpu", source)
        return TemplateAllreduce(self, name, [own], [buffer])


_POINTER = attrgetter("pointer")

# The votes of members that have agreed before: three hashes, each followed by its complement.
_AGREED = (bytes(8) + bytes([255] * 8)) * HASHES


class TemplateAllreduce(Operation):
    """Reduce buffers of all members, in place or from others.

    AVERAGE is postscale * sum_r(prescale * buffer_r) / size; for integers the quotient is
    truncated towards zero. ADASUM combines each buffer separately (see `adasum`).
    """

    def __init__(
        self,
        template: AllreduceTemplate,
        name: str,
        sources: Sequence[Any],
        targets: Sequence[Any],
        address_of: Callable[[Any], int] | None = None,
    ) -> None:
        """Both are buffers, or with `address_of` what keeps such memory on the host alive."""
        request = template.request
        self.request = request if request.name else request.renamed(name)
        self.template, self.batch_key = template, template.batch_key
        self._sources, self._targets, self._address_of = sources, targets, address_of

    @property
    def nbytes(self) -> int:
        return sum(count * dtype.itemsize for count, dtype in self.template.kinds)

    def pairs(self) -> list[BufferPair]:
        """Return the source and the result of each tensor."""
        pairs, address_of = zip(self._sources, self._targets, strict=True), self._address_of
        if address_of is None:
            return list(pairs)
        made = []
        for (source, target), (count, dtype) in zip(pairs, self.template.kinds, strict=True):
            buffer = read = Buffer(address_of(target), dtype, count, "cpu", target)
            if source is not target:
                read = Buffer(address_of(source), dtype, count, "cpu", source)
            made.append((read, buffer))
        return made

    def pieces(self) -> list[int]:
        """Return the tensors, which are in host memory, as a `VotedReduction` takes them."""
        address_of, number = self._address_of or _POINTER, 0
        pieces: list[int] = []
        for count in self.template.counts:
            pieces += (address_of(self._sources[number]), address_of(self._targets[number]), count)
            number += 1  # noqa: SIM113 - enumerate() takes longer
        return pieces

    @collective
    def vote(self, others: Sequence[Operation], communicator: Communicator, votes: bytes) -> bytes:
        template = self.template
        voted = template.voted or template.find_voted(communicator)
        if voted is None or self.streams is not HOST:
            return super().vote(others, communicator, votes)
        pieces = _pieces((self, *others)) if others else self.pieces()
        highest = voted(votes, pieces)
        if not highest and template.divides:
            _divide((self, *others), communicator.size)
        return highest

    @collective
    def execute(self, communicator: Communicator) -> None:
        template = self.template
        grouped = len(self._targets) > 1 and template.batch_key is not None
        if grouped and self._reduce_all((), communicator):
            return
        for source, buffer in self.pairs():
            if template.op is ReduceOp.ADASUM:
                if source is not buffer:
                    buffer.copy_from(source)
                adasum(communicator, buffer, template.prescale, template.postscale)
            else:
                self._reduce(communicator, source, buffer)

    def execute_batch(
        self,
        others: Sequence[Operation],
        communicator: Communicator,
        allocate: Callable[[], Buffer],
    ) -> None:
        if self._reduce_all(others, communicator):
            return
        memory = allocate()
        operations = (self, *cast("Sequence[TemplateAllreduce]", others))
        pairs = [pair for operation in operations for pair in operation.pairs()]
        for part in _fitting(pairs, memory.nbytes):
            starts = [0, *accumulate(buffer.nbytes for _, buffer in part)]
            base = memory.pointer
            for (source, buffer), start in zip(part, starts, strict=False):
                memmove(base + start, source.pointer, buffer.nbytes)
            whole = memory.slice(0, starts[-1]).view(self.template.dtype)
            self._reduce(communicator, whole, whole)
            for (_, buffer), start in zip(part, starts, strict=False):
                memmove(buffer.pointer, base + start, buffer.nbytes)

    def _reduce_all(self, others: Sequence[Operation], communicator: Communicator) -> bool:
        """Reduce operations in one call of the engine; return whether it has done so."""
        voted = self.template.voted or self.template.find_voted(communicator)
        if voted is None:
            return False
        voted(_AGREED, _pieces((self, *others)))
        if self.template.divides:
            _divide((self, *others), communicator.size)
        return True

    def _reduce(self, communicator: Communicator, source: Buffer, buffer: Buffer) -> None:
        size, template = communicator.size, self.template
        op, factor, whole = engine_reduction(template.op, buffer.dtype, template.postscale, size)
        if source is buffer:
            communicator.allreduce(buffer, op, template.prescale, factor)
        else:
            communicator.allreduce_from(source, buffer, op, template.prescale, factor)
        if whole:
            divide_truncating(buffer, size)


class Allreduce(TemplateAllreduce):
    """Such an operation with a template of its own."""

    def __init__(
        self,
        buffers: Sequence[Buffer],
        shapes: Sequence[Sequence[int]],
        op: ReduceOp,
        name: str,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        template = AllreduceTemplate(buffers, shapes, op, name, prescale, postscale)
        super().__init__(template, name, buffers, buffers)


def _pieces(operations: Sequence[Operation]) -> list[int]:
    own = cast("Sequence[TemplateAllreduce]", operations)
    return [number for operation in own for number in operation.pieces()]


def _divide(operations: Sequence[Operation], size: int) -> None:
    for operation in cast("Sequence[TemplateAllreduce]", operations):
        for _, buffer in operation.pairs():
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
    details = reduction_details(op, shapes, kinds, prescale, postscale, devices)
    return Request("allreduce", name, details, Zeros(zeros, op, prescale, postscale, devices))


def reduction_details(
    op: ReduceOp,
    shapes: Sequence[Sequence[int]],
    kinds: Sequence[str],
    prescale: float,
    postscale: float,
    devices: Sequence[str],
) -> tuple[tuple[str, str], ...]:
    """Return what must be equal on all ranks that reduce."""
    return (
        ("op", op.value),
        ("shape", ", ".join(str(tuple(shape)) for shape in shapes)),
        ("dtype", ", ".join(kinds)),
        ("prescale", repr(float(prescale))),
        ("postscale", repr(float(postscale))),
        *device_details(devices),
    )
