"""Gradients of virtual shards, bitwise equal on 1, 2, 4, 8 ... ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from hvdtrain.core import context
from hvdtrain.core.ordered import branch
from hvdtrain.errors import UsageError

Gradients = list[torch.Tensor | None]


def own_shards(shards: int) -> range:
    """Return the numbers of this rank's shards (local).

    After ranks were lost, those beyond the largest power of two have none.

    Raises:
        UsageError: `shards` or the number of ranks is not a power of two, or there are more ranks
            than shards.
    """
    here = context.current()
    topology = here.topology
    if here.changed:
        return branch(shards, topology.rank, topology.size)
    if shards < 1 or shards & (shards - 1) or topology.size & (topology.size - 1):
        raise UsageError(
            f"{shards} virtual shards on {topology.size} ranks: both must be powers of two"
        )
    if topology.size > shards:
        raise UsageError(
            f"{shards} virtual shards are too few for {topology.size} ranks: use at "
            "least as many shards as ranks"
        )
    return branch(shards, topology.rank, topology.size)


def backward_by_shards(
    parameters: Iterable[torch.nn.Parameter],
    shards: int,
    loss_of: Callable[[int], torch.Tensor],
) -> None:
    """Set `grad` to the sum of the gradients of this rank's shards (local).

    One backward pass runs for each shard, and gradients are summed along a binary tree over all
    shards, of which this rank's part is one branch. With HVDTRAIN_DETERMINISTIC=1 and
    op=hvd.Sum, step() continues along that tree, so the gradient is bitwise equal on any number
    of ranks that is a power of two, if each rank computes with the same number of threads. This
    does not hold for half types, which are rounded differently within and between ranks.

    Args:
        parameters: parameters given to DistributedOptimizer; frozen ones are skipped.
        shards: number of shards on all ranks, a power of two.
        loss_of: function that computes the loss of a shard, given its number, as a term of a sum
            over all shards (divide by the total number of samples). Any randomness in it must
            depend on the number alone.

    Raises:
        UsageError: as for `own_shards`.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    # Sums of 1, 2, 4 ... neighboring shards that wait for their sibling, as in a binary counter.
    waiting: list[tuple[int, Gradients]] = []
    for shard in own_shards(shards):
        loss = loss_of(shard)
        gradients: Gradients = list(torch.autograd.grad(loss, trainable, allow_unused=True))
        count = 1
        while waiting and waiting[-1][0] == count:
            _, earlier = waiting.pop()
            gradients = [_add(a, b) for a, b in zip(earlier, gradients, strict=True)]
            count *= 2
        waiting.append((count, gradients))
    nothing: Gradients = [None] * len(trainable)
    total = waiting[0][1] if waiting else nothing  # step() takes None for zeros
    for parameter, gradient in zip(trainable, total, strict=True):
        parameter.grad = gradient


def _add(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b
