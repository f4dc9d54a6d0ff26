"""Gradients with 1, 2, 4 or 8 bits per element, as in CNTK's 1-bit SGD (Seide et al. 2014)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TypeAlias

from hvdtrain.arrays import Array, buffer_of, copy, like_shape
from hvdtrain.collective import collective
from hvdtrain.core.exchanges.codes import (
    BITS,
    BlockTable,
    block_tables,
    code_message,
    coded_bytes,
)
from hvdtrain.core.exchanges.error_feedback import ErrorFeedback, sum_together
from hvdtrain.core.gradients.communicators import slice_bounds
from hvdtrain.core.gradients.exchange import FilledBucket
from hvdtrain.engines.communicator import Communicator

# Views of rows that one rank sums, each [rows, length].
_Stripe: TypeAlias = Sequence[Array]


class NBitExchange(ErrorFeedback):
    """Send codes of few bits, twice, and keep what both lose for the next step.

    Each member of the network sums a stripe of the blocks: it adds what the codes of the others
    stand for to its own elements, and sends the codes of the sum to all. Elements that fill no
    block are summed uncompressed.

    Args:
        bits: bits per element, 1, 2, 4 or 8.
        block: number of elements that have a range of their own, a multiple of 8; 0 for the columns
            of each parameter as a matrix.
        per_rank: compress what each rank sends, not only what each node sends.

    Raises:
        ValueError: `bits` or `block` is none of these.
    """

    def __init__(self, bits: int = 1, block: int = 512, per_rank: bool = False) -> None:
        super().__init__(f"nbit:bits={bits},block={block}", per_rank)
        if bits not in BITS:
            raise ValueError(f"bits must be 1, 2, 4 or 8, got {bits}")
        if block < 0 or block % 8:
            raise ValueError(f"block must be a multiple of 8, or 0 for columns, got {block}")
        self._bits, self._block = bits, block
        self.whole_tensors = block == 0
        self.exactness = (
            f"Between {self._sender}s {bits} bit{'s' if bits > 1 else ''} per element; what is "
            "lost is added to the next step's gradients."
        )

    @collective
    def combine(
        self,
        bucket: FilledBucket,
        elements: Array,
        start: int,
        network: Communicator,
        factor: float,
    ) -> Array:
        tables, rest = block_tables(bucket, elements, start, self._block)
        error = copy(elements)
        lossy, exact = block_tables(bucket, error, start, self._block)
        sum_together(rest, network)
        for part in exact:
            part[...] = 0
        if tables:
            received = self._sum(_stripes(lossy, network.size), network)
            for message, stripe in zip(received, _stripes(tables, network.size), strict=True):
                code_message("decode", message, stripe, self._bits)
        elements *= factor
        return error

    @collective
    def _sum(self, stripes: Sequence[_Stripe], network: Communicator) -> list[Array]:
        """Return the messages about the sums, and leave in the stripes what is lost."""
        rank, sizes = network.rank, [coded_bytes(stripe, self._bits) for stripe in stripes]
        model = next(stripe[0] for stripe in stripes if stripe)
        # Members send the others' stripes to them.
        sent = [0 if member == rank else size for member, size in enumerate(sizes)]
        taken = [0 if member == rank else sizes[rank] for member in range(network.size)]
        messages = like_shape(model, (sum(sent),), "uint8")
        for message, stripe, size in zip(_cut(messages, sent), stripes, sent, strict=True):
            if size:
                code_message("encode", message, stripe, self._bits)
        received = like_shape(model, (sum(taken),), "uint8")
        network.alltoall(buffer_of(messages), buffer_of(received), sent, taken)
        for message in _cut(received, taken):
            if message.shape[0]:
                code_message("add_decoded", message, stripes[rank], self._bits)
        message = like_shape(model, (sizes[rank],), "uint8")
        code_message("encode", message, stripes[rank], self._bits)
        received = like_shape(model, (sum(sizes),), "uint8")
        network.allgather(buffer_of(message), buffer_of(received), sizes)
        return _cut(received, sizes)


def _stripes(tables: Sequence[BlockTable], ranks: int) -> list[_Stripe]:
    """Divide the rows of each table among the ranks."""
    bounds = [slice_bounds(table.count, ranks) for table in tables]
    return [
        [
            view
            for table, at in zip(tables, bounds, strict=True)
            for view in table.rows(at[rank], at[rank + 1])
        ]
        for rank in range(ranks)
    ]


def _cut(messages: Array, sizes: Sequence[int]) -> list[Array]:
    """Return views of messages that lie one after the other."""
    return [messages[low:high] for low, high in pairwise(accumulate(sizes, initial=0))]
