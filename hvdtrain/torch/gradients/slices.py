"""Gradients of which each rank has the slices that it owns (collective)."""

from __future__ import annotations

from hvdtrain.core.sharding.exchange import ShardedExchange
from hvdtrain.core.sharding.operations import SlicedBuckets, SpreadSlices, SumSlices
from hvdtrain.torch.gradients.buckets import ParameterBuckets


def sum_slices(buckets: ParameterBuckets) -> None:
    """Sum the slices of this rank whose sums were left to the optimizer's step."""
    exchange, reducer = buckets.exchange, buckets.reducer
    if isinstance(exchange, ShardedExchange) and exchange.pending:
        numbers = sorted(exchange.pending)
        chosen = [reducer.buffers[number] for number in numbers]
        placed = [reducer.placed[number] for number in numbers]
        sliced = SlicedBuckets(chosen, placed, exchange.slices)
        buckets.run(SumSlices(sliced, exchange.scales, f"sums of {reducer.name}"))
        exchange.pending.clear()


def spread_slices(buckets: ParameterBuckets) -> None:
    """Give all ranks the reduced gradients of all slices."""
    sum_slices(buckets)
    exchange, reducer = buckets.exchange, buckets.reducer
    if isinstance(exchange, ShardedExchange):
        sliced = SlicedBuckets(reducer.buffers, reducer.placed, exchange.slices)
        buckets.run(SpreadSlices(sliced, f"gradients of {reducer.name}"))
