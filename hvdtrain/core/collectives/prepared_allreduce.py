"""All-reduces that a program calls again and again with other data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from hvdtrain.buffer import Buffer
from hvdtrain.core.agreement.prepared import Prepared
from hvdtrain.core.agreement.request import Request
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
        self._buffer_of, self._address_of = buffer_of, address_of
        buffer = buffer_of(example)
        first = Allreduce([buffer], [shape], op, name, prescale, postscale)
        super().__init__(first.request, next_name)
        self._model = first.without_data()
        self._voted = _voted_reduction(communicator, buffer, op, prescale, postscale)

    def vote(self, communicator: Communicator, data: tuple[_Tensor, _Tensor]) -> Verdict:
        if self._voted is None:
            return super().vote(communicator, data)
        source, target = data
        return self._voted(self.ballot, self._address_of(source), self._address_of(target))

    def operation(self, data: tuple[_Tensor, _Tensor]) -> Allreduce:
        return self._over(self.request, data)

    def new_operation(self, data: tuple[_Tensor, _Tensor]) -> Allreduce:
        """Return the operation of a call of its own (local, in any thread)."""
        return self._over(self.next_request(), data)

    def _over(self, request: Request, data: tuple[_Tensor, _Tensor]) -> Allreduce:
        source, target = data
        buffer = self._buffer_of(target)
        read = buffer if source is target else self._buffer_of(source)
        return Allreduce.repeated(self._model, request, read, buffer)


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
