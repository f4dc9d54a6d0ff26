"""Gradients with 1, 2, 4 or 8 bits per element, as in CNTK's 1-bit SGD (Seide et al. 2014)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from hvdtrain.arrays import Array, buffer_of, concatenate, like_shape, zeros_like
from hvdtrain.core.compression.block_tables import block_tables
from hvdtrain.core.compression.codes import BITS, add_decoded, decode
from hvdtrain.core.compression.error_feedback import ErrorFeedback, sum_together
from hvdtrain.core.compression.messages import coded_bytes, from_message, to_message
from hvdtrain.core.gradients.communicators import slice_bounds
from hvdtrain.core.gradients.exchange import FilledBucket
from hvdtrain.engines.communicator import Communicator

__all__ = ["NBitExchange"]


class NBitExchange(ErrorFeedback):
    """Send codes of few bits, twice, and keep what both lose for the next step.

    Each member of the network sums a stripe of the blocks: it adds what the codes of the others
    stand for to its own elements, and sends the codes of the sum to all. Elements that fill no
    block are summed uncompressed.

    Args:
        bits: bits per element, 1, 2, 4 or 8.
        block: number of elements that have a range of their own, a multiple of 8; 0 for the columns
            of each parameter as a matrix.

    Raises:
        ValueError: `bits` or `block` is none of these.
    """

    def __init__(self, bits: int = 1, block: int = 512) -> None:
        super().__init__()
        if bits not in BITS:
            raise ValueError(f"bits must be 1, 2, 4 or 8, got {bits}")
        if block < 0 or block % 8:
            raise ValueError(f"block must be a multiple of 8, or 0 for columns, got {block}")
        self._bits, self._block = bits, block
        self.whole_tensors = block == 0
        self.spec = f"nbit:bits={bits},block={block}"
        self.exactness = (
            f"Between nodes {bits} bit{'s' if bits > 1 else ''} per element; what is lost is added "
            "to the next step's gradients."
        )

    def combine(
        self,
        bucket: FilledBucket,
        elements: Array,
        start: int,
        network: Communicator,
        factor: float,
    ) -> Array:
        tables, rest = block_tables(bucket, elements, start, self._block)
        sum_together(rest, network)
        error = zeros_like(elements)
        if tables:
            own = [table.rows() for table in tables]
            for table, total in zip(tables, self._sum(own, network), strict=True):
                table.fill(total)
            lost, _ = block_tables(bucket, error, start, self._block)
            for table, rows in zip(lost, own, strict=True):
                table.fill(rows)
        elements *= factor
        return error

    def _sum(self, tables: Sequence[Array], network: Communicator) -> list[Array]:
        """Return the sums of all members' matrices, and leave in them what is lost (collective).

        Args:
            tables: matrices of this rank, each [rows, length].
            network: communicator of the members.
        """
        bounds = [slice_bounds(table.shape[0], network.size) for table in tables]
        stripes = [
            [table[at[rank] : at[rank + 1]] for table, at in zip(tables, bounds, strict=True)]
            for rank in range(network.size)
        ]
        own = stripes[network.rank]
        for message in self._swap(stripes, network):
            received = from_message(message, own, self._bits)
            for rows, (codes, factors) in zip(own, received, strict=True):
                add_decoded(rows, codes, factors)
        totals = [like_shape(table, table.shape) for table in tables]
        for rank, message in enumerate(self._gather(stripes, network)):
            received = from_message(message, stripes[rank], self._bits)
            for total, at, (codes, factors) in zip(totals, bounds, received, strict=True):
                total[at[rank] : at[rank + 1]] = decode(codes, factors)
        return totals

    def _swap(self, stripes: Sequence[Sequence[Array]], network: Communicator) -> list[Array]:
        """Send each stripe to its owner; return what the others have sent, in rank order.

        A rank's own stripe stays as it is, without an error.
        """
        empty = like_shape(stripes[0][0], (0,), "uint8")
        others = [rank for rank in range(network.size) if rank != network.rank]
        messages = [
            empty if rank == network.rank else to_message(stripe, self._bits)
            for rank, stripe in enumerate(stripes)
        ]
        size = coded_bytes(stripes[network.rank], self._bits)
        received = like_shape(empty, (size * len(others),))
        network.alltoall(
            buffer_of(concatenate(messages)),
            buffer_of(received),
            [message.shape[0] for message in messages],
            [0 if rank == network.rank else size for rank in range(network.size)],
        )
        return [received[number * size : (number + 1) * size] for number in range(len(others))]

    def _gather(self, stripes: Sequence[Sequence[Array]], network: Communicator) -> list[Array]:
        """Return the messages of all owners about their stripes, in rank order."""
        message = to_message(stripes[network.rank], self._bits)
        sizes = [coded_bytes(stripe, self._bits) for stripe in stripes]
        received = like_shape(message, (sum(sizes),))
        network.allgather(buffer_of(message), buffer_of(received), sizes)
        starts = accumulate(sizes, initial=0)
        return [received[low:high] for low, high in pairwise(starts)]
