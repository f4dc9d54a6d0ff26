"""All-reduces that a program calls again and again with other data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from hvdtrain.buffer import Buffer
from hvdtrain.core.agreement.prepared import Prepared
from hvdtrain.core.collectives.allreduce import Allreduce, engine_reduction
from hvdtrain.engines.communicator import Communicator, Verdict, VotedReduction
from hvdtrain.types import ReduceOp

__all__ = ["PreparedAllreduce"]

# A framework's tensor or array.
_Tensor: TypeAlias = Any


class PreparedAllreduce(Prepared):
    """The reduction of one tensor, prepared; its data are a pair of source and result.

    Args:
        communicator: communicator of the members.
        example: a tensor like those that are reduced.
        shape: shape of the tensors.
        op: reduction.
        name: name of the operation; of a numbered one that of the first call.
        prescale: factor before the reduction.
        postscale: factor after the reduction.
        buffer_of: function that returns a buffer over the memory of a tensor.
        address_of: function that returns the address of a tensor in host memory.
        next_name: function that returns the name of the next call; None if all have the same.
    """

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
    ) -> None:
        self._shape, self._op = shape, op
        self._prescale, self._postscale = prescale, postscale
        self._buffer_of, self._address_of = buffer_of, address_of
        super().__init__(self._reduction(name, example, example).request, next_name)
        self._voted = self._voted_reduction(communicator, buffer_of(example))

    def _voted_reduction(self, communicator: Communicator, like: Buffer) -> VotedReduction | None:
        if self._op is ReduceOp.ADASUM or like.device != "cpu":
            return None
        dtype, size = like.dtype, communicator.size
        op, factor, divides = engine_reduction(self._op, dtype, self._postscale, size)
        if divides:
            return None
        return communicator.voted_reduction(like.count, dtype, op, self._prescale, factor)

    def vote(self, communicator: Communicator, data: tuple[_Tensor, _Tensor]) -> Verdict:
        if self._voted is None:
            return super().vote(communicator, data)
        source, target = data
        return self._voted(self.ballot, self._address_of(source), self._address_of(target))

    def operation(self, data: tuple[_Tensor, _Tensor]) -> Allreduce:
        return self._reduction(self.request.name, *data)

    def _reduction(self, name: str, source: _Tensor, target: _Tensor) -> Allreduce:
        buffer = self._buffer_of(target)
        return Allreduce(
            [buffer],
            [self._shape],
            self._op,
            name,
            self._prescale,
            self._postscale,
            sources=[buffer if source is target else self._buffer_of(source)],
        )
