"""The exchange of a shared optimizer step: each owner gets the average or sum of its slices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hvdtrain.buffer import Buffer, Elements
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.exchanges.allreduce import AllreduceExchange
from hvdtrain.core.gradients.communicators import Communicators
from hvdtrain.core.gradients.exchange import Exchange, FilledBucket, StepInfo
from hvdtrain.core.sharding.scattered import ScatteredSlices
from hvdtrain.engines.slices import Slices
from hvdtrain.types import DType, ReduceOp

# Types of the weights that the compiled kernel updates.
KERNEL_TYPES = (DType.FLOAT32, DType.FLOAT64)
# Slices in memory that the ranks of a node share, or in that of each rank.
OwnedSlices: TypeAlias = Slices | ScatteredSlices


def owned_slices(channel: Channel, memory: Mapping[str, Elements]) -> OwnedSlices | None:
    """Return the slices of a plan's buckets, or None if ranks cannot share their work.

    The result is of the same kind on all ranks of the channel.
    """
    slices = channel.communicator.slices()
    on_host = set(memory) == {"cpu"}
    if slices is not None and slices.owners > 1 and on_host and slices.copies(memory["cpu"]):
        return slices
    if len(channel.ranks) == 1:
        return None
    places = {kind: Buffer.of(elements).device for kind, elements in memory.items()}
    staged = any(place.partition(":")[0] != kind for kind, place in places.items())
    return None if staged else ScatteredSlices(channel.communicator)


class ShardedExchange(Exchange):
    """Like AllreduceExchange, but only the owner of a slice gets its result.

    A joined rank cannot take part, because it would have to update the weights that it owns.
    """

    exactness = AllreduceExchange.exactness
    half_types = True
    in_place = True

    def __init__(
        self, slices: OwnedSlices, op: ReduceOp = ReduceOp.AVERAGE, predivide: float = 1.0
    ) -> None:
        self._inner = AllreduceExchange(op, predivide)
        self.slices = slices
        self.whole = True
        self.pending: set[int] = set()
        self.scales = (1.0, 1.0)
        self.defer_to(None)

    def defer_to(self, board: npt.NDArray[np.float64] | None) -> None:
        """Leave sums of real numbers to the optimizer's step, from the next step on.

        Args:
            board: memory for the factor of this rank's gradients, [1], which the ranks of the node
                can read; None to sum again as gradients arrive. On all ranks or none.
        """
        self._board, self.at_once = board, board is not None
        self.spec = f"{self._inner.spec},sharded{',deferred' * (board is not None)}"

    def reduce(self, bucket: FilledBucket, info: StepInfo, communicators: Communicators) -> None:
        if bucket.number == 0:
            self.pending.clear()
        if self.whole:
            self._inner.reduce(bucket, info, communicators)
        elif self._board is not None and bucket.buffer.dtype in KERNEL_TYPES:
            # The sum of the step's numbers, at its end, is where ranks meet.
            self.scales = self._inner.factors(info)
            self._board[0] = self.scales[0]
            self.pending.add(bucket.number)
        elif bucket.placed is not None:
            bucket.placed.reduce(*self._inner.factors(info), everywhere=False)
        else:
            self.slices.reduce(bucket.buffer, *self._inner.factors(info))
