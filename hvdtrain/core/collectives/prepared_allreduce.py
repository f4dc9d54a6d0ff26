"""All-reduces that a program calls again and again with other data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from hvdtrain.buffer import Buffer
from hvdtrain.core.agreement.prepared import Prepared
from hvdtrain.core.agreement.request import Request
from hvdtrain.core.collectives.allreduce import Allreduce, BufferPair
from hvdtrain.core.collectives.allreduce_terms import engine_reduction
from hvdtrain.engines.communicator import Communicator, Verdict, VotedReduction
from hvdtrain.types import DType, ReduceOp

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
