"""Sums in a fixed order: the same bits in every run, for any buckets and any engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from hvdtrain.arrays import elements_of
from hvdtrain.buffer import Buffer
from hvdtrain.engines.communicator import Communicator, Slices, VotedReduction
from hvdtrain.types import DType, ReduceOp

# A numpy array or a torch tensor.
Array: TypeAlias = Any


def tree_sum(terms: Sequence[Array]) -> Array:
    """Return the sum of arrays along a binary tree: neighbors are added until one is left.

    An array without a neighbor moves up a level unchanged. If N and V are powers of two and N
    divides V, the tree sum of N tree sums of V / N neighbors each has the same bits as the tree
    sum of all V.
    """
    while len(terms) > 1:
        pairs = zip(terms[::2], terms[1::2], strict=False)
        rest = terms[len(terms) - len(terms) % 2 :]
        terms = [a + b for a, b in pairs] + list(rest)
    return terms[0]


def branch(terms: int, rank: int, size: int) -> range:
    """Return the numbers of the terms that a rank adds, so that ranks continue along a binary tree.

    Ranks beyond the largest power of two add none.
    """
    adding = 1 << (min(terms, size).bit_length() - 1)
    each = terms // adding
    return range(rank * each, (rank + 1) * each) if rank < adding else range(0)


def _inners(name: str) -> Any:
    """Return a method that calls the inner communicator's."""

    def call(self: OrderedCommunicator, *arguments: Any) -> Any:
        return getattr(self._inner, name)(*arguments)

    return call


class OrderedCommunicator(Communicator):
    """A communicator that computes floating-point sums along a binary tree over the ranks.

    If the inner communicator does not do so itself, each rank receives its slice of all buffers,
    sums it, and sends the sum to all ranks; the traffic is that of an ordinary all-reduce.
    """

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner
        self.rank, self.size = inner.rank, inner.size
        self._tree_sums = inner.capabilities.tree_sums
        # Otherwise half types are staged in float32, which numpy can add.
        self.capabilities = replace(inner.capabilities, half_types=self._tree_sums)

    # What the order of sums does not concern.
    start_max, broadcast = _inners("start_max"), _inners("broadcast")
    allgather, alltoall = _inners("allgather"), _inners("alltoall")
    barrier, point_to_point = _inners("barrier"), _inners("point_to_point")
    empty, take_device = _inners("empty"), _inners("take_device")
    native, put = _inners("native"), _inners("put")
    confirm, explained = _inners("confirm"), _inners("explained")
    close, abort = _inners("close"), _inners("abort")

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
        """Return whether the engine itself sums along the tree, which it does only on the host."""
        return self._tree_sums and buffer.device == "cpu"

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

    def voted_reduction(
        self, dtype: DType, op: ReduceOp, prescale: float, postscale: float
    ) -> VotedReduction | None:
        if not self._tree_sums:
            return None
        return self._inner.voted_reduction(dtype, op, prescale, postscale)

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
        """Write the sum of all ranks' slices for this rank to `receive`."""
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

    def split(self, ranks: Sequence[int]) -> OrderedCommunicator | None:
        inner = self._inner.split(ranks)
        return None if inner is None else OrderedCommunicator(inner)

    def slices(self) -> Slices | None:
        return self._inner.slices() if self._tree_sums else None
