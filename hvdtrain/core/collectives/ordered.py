"""Sums in one fixed order: the same bits from run to run, whatever the buckets and the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hvdtrain.arrays import elements_of
from hvdtrain.buffer import Buffer, Elements
from hvdtrain.engines.communicator import Communicator, Pending
from hvdtrain.types import ReduceOp

__all__ = ["OrderedCommunicator", "tree_sum"]

# A numpy array or a torch tensor.
Array: TypeAlias = Any


def tree_sum(terms: Sequence[Array]) -> Array:
    """Add neighbours until one is left; an odd one out moves up as it is.

    Where N divides V, N sums of V / N neighbours each, added up in this way, have the bits of
    the sum of all V, if both are powers of two.
    """
    while len(terms) > 1:
        pairs = zip(terms[::2], terms[1::2], strict=False)
        rest = terms[len(terms) - len(terms) % 2 :]
        terms = [a + b for a, b in pairs] + list(rest)
    return terms[0]


class OrderedCommunicator(Communicator):
    """A communicator whose sums of fractional numbers are added along a tree over the ranks.

    Where its inner one does not do so by itself, each rank gets its slice of everybody's buffer,
    adds, and hands the sum to all: as many bytes travel as in any other all-reduce.

    Args:
        inner: moves the bytes, and does all else.
    """

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner
        self.rank, self.size = inner.rank, inner.size
        self._trees = inner.capabilities.trees
        # Else halves are staged in float32, which numpy can add.
        self.capabilities = replace(inner.capabilities, halves=self._trees)

    def start_max(self, values: npt.NDArray[np.uint64]) -> Pending:
        return self._inner.start_max(values)

    def allreduce(
        self, buffer: Buffer, op: ReduceOp, prescale: float = 1.0, postscale: float = 1.0
    ) -> None:
        if self._inner_orders(buffer) or op is not ReduceOp.SUM or buffer.dtype.is_integer:
            self._inner.allreduce(buffer, op, prescale, postscale)
            return
        bounds = [buffer.count * rank // self.size for rank in range(self.size + 1)]
        counts = [end - start for start, end in pairwise(bounds)]
        buffer = self.native(buffer)
        part = buffer.like(counts[self.rank])
        self._sum_parts(buffer, part, counts, prescale, postscale)
        self._inner.allgather(part, buffer, counts)

    def _inner_orders(self, buffer: Buffer) -> bool:
        """Return whether the engine itself adds along the tree; those that do, on the host only."""
        return self._trees and buffer.device == "cpu"

    def allreduce_from(
        self,
        source: Buffer,
        buffer: Buffer,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        if self._inner_orders(buffer):
            self._inner.allreduce_from(source, buffer, op, prescale, postscale)
        else:
            super().allreduce_from(source, buffer, op, prescale, postscale)

    def reduce_scatter(
        self,
        send: Buffer,
        receive: Buffer,
        counts: Sequence[int],
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        inners = send.dtype.is_integer or (self._inner_orders(send) and send.dtype.is_half)
        if op is not ReduceOp.SUM or inners:
            self._inner.reduce_scatter(send, receive, counts, op, prescale, postscale)
        else:
            self._sum_parts(send, receive, counts, prescale, postscale)

    @np.errstate(all="ignore")  # as in MPI and C; loss scalers look for what overflows
    def _sum_parts(
        self,
        send: Buffer,
        receive: Buffer,
        counts: Sequence[int],
        prescale: float,
        postscale: float,
    ) -> None:
        """Put the sum of everybody's part of this rank into `receive`."""
        count = counts[self.rank]
        send, receive = self.native(send), self.native(receive)
        incoming = send.like(self.size * count)
        if prescale != 1.0:
            scaled = send.like(send.count)
            scaled.copy_from(send)
            scaled.scale(prescale)
            send = scaled
        self._inner.alltoall(send, incoming, counts, [count] * self.size)
        parts = elements_of(incoming).reshape(self.size, count)
        elements_of(receive)[:] = tree_sum([parts[rank] for rank in range(self.size)])
        receive.scale(postscale)

    def broadcast(self, buffer: Buffer, root_rank: int) -> None:
        self._inner.broadcast(buffer, root_rank)

    def allgather(self, send: Buffer, receive: Buffer, counts: Sequence[int]) -> None:
        self._inner.allgather(send, receive, counts)

    def alltoall(
        self,
        send: Buffer,
        receive: Buffer,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
    ) -> None:
        self._inner.alltoall(send, receive, send_counts, receive_counts)

    def barrier(self) -> None:
        self._inner.barrier()

    def split(self, ranks: Sequence[int]) -> OrderedCommunicator | None:
        inner = self._inner.split(ranks)
        return None if inner is None else OrderedCommunicator(inner)

    def empty(self, nbytes: int, device: str = "cpu") -> Elements:
        return self._inner.empty(nbytes, device)

    def take_device(self) -> None:
        self._inner.take_device()

    def native(self, buffer: Buffer) -> Buffer:
        return self._inner.native(buffer)

    def put(self, source: Buffer, buffer: Buffer) -> None:
        self._inner.put(source, buffer)

    def close(self) -> None:
        self._inner.close()

    def abort(self, code: int) -> None:
        self._inner.abort(code)
