"""The exchange of a shared optimizer step: each owner gets the average or sum of its slices."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from hvdtrain.buffer import Elements
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.exchanges.allreduce import AllreduceExchange
from hvdtrain.core.gradients.communicators import Communicators
from hvdtrain.core.gradients.exchange import Exchange, FilledBucket, StepInfo
from hvdtrain.engines.slices import Slices
from hvdtrain.types import DType, ReduceOp

__all__ = ["KERNEL_TYPES", "ShardedExchange", "shared_slices"]

# Types of the weights that the compiled kernel updates.
KERNEL_TYPES = (DType.FLOAT32, DType.FLOAT64)


def shared_slices(channel: Channel, memory: Mapping[str, Elements]) -> Slices | None:
    """Return the slices of a plan's buckets, or None if ranks cannot share their work (local).

    The result is None on all ranks of the channel, or on none.

    Args:
        channel: channel of the plan.
        memory: memory of the buckets by device.
    """
    slices = channel.communicator.slices()
    if slices is None or slices.owners == 1 or set(memory) != {"cpu"}:
        return None
    return slices if slices.copies(memory["cpu"]) is not None else None


class ShardedExchange(Exchange):
    """Like AllreduceExchange, but only the owner of a slice gets its result.

    A joined rank cannot take part, because it would have to update the weights that it owns.

    Args:
        op, predivide: as for AllreduceExchange.

    Attributes:
        whole: whether all ranks get the results of all slices, as until the plan is final.
        pending: numbers of the buckets whose sums are left.
        scales: factors of their gradients before the sum on this rank, and after it.
    """

    exactness = AllreduceExchange.exactness
    half_types = True

    def __init__(self, op: ReduceOp = ReduceOp.AVERAGE, predivide: float = 1.0) -> None:
        self._inner = AllreduceExchange(op, predivide)
        self.whole = True
        self.defer_to(None)
        self.pending: set[int] = set()
        self.scales = (1.0, 1.0)

    def defer_to(self, board: npt.NDArray[np.float64] | None) -> None:
        """Leave sums of real numbers to the optimizer's step, from the next step on (local).

        Args:
            board: memory for the factor of this rank's gradients, [1], which the ranks of the node
                can read; None to sum again as gradients arrive. On all ranks or none.
        """
        self._board = board
        self.spec = f"{self._inner.spec},sharded{',deferred' * (board is not None)}"

    def reduce(self, bucket: FilledBucket, info: StepInfo, communicators: Communicators) -> None:
        slices = communicators.all_ranks.slices()
        if bucket.number == 0:
            self.pending.clear()
        if self.whole or slices is None:
            self._inner.reduce(bucket, info, communicators)
        elif self._board is not None and bucket.buffer.dtype in KERNEL_TYPES:
            # The sum of the step's numbers, at its end, is where ranks meet.
            self.scales = self._inner.factors(info)
            self._board[0] = self.scales[0]
            self.pending.add(bucket.number)
        else:
            slices.reduce(bucket.buffer, *self._inner.factors(info))
