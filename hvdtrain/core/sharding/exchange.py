"""The exchange of a shared optimizer step: each owner gets the average or sum of its slices."""

from __future__ import annotations

from collections.abc import Mapping

from hvdtrain.buffer import Elements
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.exchanges.allreduce import AllreduceExchange
from hvdtrain.core.gradients.communicators import Communicators
from hvdtrain.core.gradients.exchange import Exchange, FilledBucket, StepInfo
from hvdtrain.engines.slices import Slices
from hvdtrain.types import ReduceOp

__all__ = ["ShardedExchange", "shared_slices"]


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
    """

    exactness = AllreduceExchange.exactness
    half_types = True
    in_place = True

    def __init__(self, op: ReduceOp = ReduceOp.AVERAGE, predivide: float = 1.0) -> None:
        self._inner = AllreduceExchange(op, predivide)
        self.spec = f"{self._inner.spec},sharded"
        self.whole = True

    def reduce(self, bucket: FilledBucket, info: StepInfo, communicators: Communicators) -> None:
        slices = communicators.all_ranks.slices()
        if self.whole or slices is None:
            self._inner.reduce(bucket, info, communicators)
        elif bucket.placed is not None:
            bucket.placed.reduce(*self._inner.factors(info), everywhere=False)
        else:
            slices.reduce(bucket.buffer, *self._inner.factors(info))
