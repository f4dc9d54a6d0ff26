"""Agreement of the ranks on bucket plans, their sizes and their channels."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, TypeVar

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.config import DEFAULT_BUCKET_BYTES
from hvdtrain.core import context
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.agreement.operation import Request, Work
from hvdtrain.core.gradients.plan import (
    STEP,
    BucketPlan,
    BucketSize,
    ParameterSpec,
    choose_bucket_size,
    first_difference,
    make_plan,
    measuring,
    plan_of_layout,
    size_text,
)
from hvdtrain.core.objects import allgather_object, broadcast_object
from hvdtrain.errors import MismatchError

if TYPE_CHECKING:
    from hvdtrain.core.places import PlacedBucket

_logger = logging.getLogger("hvdtrain")

# The reason of a bucket size that comes from a checkpoint.
_AS_BEFORE = "as in the checkpoint"


@collective
def agree_on_bucket_size(channel: Channel) -> BucketSize:
    """Return the maximum bucket size: as configured on rank 0, measured once, or the default."""
    kept = context.current().bucket_sizes.get(channel)
    if kept is not None:
        return kept
    return context.current().first_use.settle(
        channel, "bucket size", lambda: _agree_on_bucket_size(channel)
    )


@collective
def _agree_on_bucket_size(channel: Channel) -> BucketSize:
    here = context.current()
    # Ranks on other hosts may not have the first one's environment.
    given = broadcast_object(here.config.bucket_bytes, channel.ranks[0], "bucket size", channel)
    if given is not None:
        size = BucketSize(given, "as set")
    elif len(channel.ranks) == 1:
        size = BucketSize(DEFAULT_BUCKET_BYTES, "the default for one rank")
    else:
        size = choose_bucket_size(channel.run(measuring()))
    here.bucket_sizes[channel] = size
    return size


@collective
def agree_on_plan(
    specs: list[ParameterSpec],
    channel: Channel,
    groups: Sequence[Sequence[int]] = (),
) -> BucketPlan:
    """Return the bucket plan of the channel's first rank, which logs it, on every rank."""
    here = context.current()
    limit = agree_on_bucket_size(channel)
    own = make_plan(specs, limit.nbytes, here.config.first_bucket_bytes, groups)
    root_rank = channel.ranks[0]
    plan: BucketPlan = broadcast_object(own, root_rank, "bucket plan", channel)
    differences = allgather_object(
        first_difference(specs, plan.specs, root_rank), "bucket plan", channel
    )
    for rank, difference in zip(channel.ranks, differences, strict=True):
        if difference is not None:
            raise MismatchError(
                f"[rank {rank}/{here.topology.size}] DistributedOptimizer: {difference}. Build "
                "the same model on every rank"
            )
    here.buckets = _description(plan, limit.reason)
    if here.topology.rank == root_rank:
        _logger.info("buckets: %s", here.buckets)
    return plan


@collective
def take_layout(plan: BucketPlan, layout: Mapping[str, Any] | None, channel: Channel) -> BucketPlan:
    """Return a plan with the layout that the channel's first rank gives."""
    taken = broadcast_object(layout, channel.ranks[0], "bucket plan", channel)
    if taken is None:
        return plan
    plan = plan_of_layout(plan, taken)
    context.current().buckets = _description(plan, _AS_BEFORE)
    return plan


def _description(plan: BucketPlan, reason: str) -> str:
    return (
        f"{len(plan.buckets)} for {size_text(plan.nbytes)} of gradients, at most "
        f"{size_text(plan.bucket_bytes)} each ({reason})"
    )


def replan(
    plan: BucketPlan, positions: Sequence[int], unused: Set[int] = frozenset()
) -> BucketPlan:
    """Return a plan for the order in which gradients have arrived."""
    order = sorted(range(len(positions)), key=lambda index: (positions[index], -index))
    return make_plan(
        plan.specs, plan.bucket_bytes, plan.first_bucket_bytes, plan.groups, order, unused
    )


P = TypeVar("P", bound="PlacedBucket")


def placed_buckets(
    plan: BucketPlan,
    buffers: Sequence[Buffer],
    make: Callable[[Mapping[int, tuple[int, int]], Buffer], P],
) -> list[P | None]:
    """Return each bucket of which some gradients may lie elsewhere; None for the others."""
    from hvdtrain.core.allocators import LEAST_BYTES

    found: list[P | None] = []
    for layout, buffer in zip(plan.buckets, buffers, strict=True):
        starts = dict(zip(layout.parameters, layout.starts, strict=True))
        extents = {index: (start, plan.specs[index].count) for index, start in starts.items()}
        large = any(plan.specs[index].nbytes >= LEAST_BYTES for index in extents)
        found.append(make(extents, buffer) if large else None)
    return found


@collective
def open_plan_channel(parent: Channel) -> Channel:
    """Open a channel with the members of `parent` for the steps of a plan.

    Without threads this returns `parent`, because a rank that waits in one channel does not serve
    another one.
    """
    if not parent.has_thread:
        return parent
    close_unused_plans(parent)
    here = context.current()
    channel = here.open_channel(range(len(parent.ranks)), f"bucket plan of {parent.label}", parent)
    assert channel is not None  # every rank of the parent is a member
    return channel


@collective
def close_unused_plans(parent: Channel) -> None:
    """Close the channels of plans that no member of `parent` needs any more.

    A communicator can only be freed by all of its members together, and MPI has a limited number.
    """
    here = context.current()
    mine = [c for c in here.channels() if c.parent is parent]
    unused = allgather_object([c.unused for c in mine], "unused plans", parent)
    for old, everywhere in zip(mine, map(all, zip(*unused, strict=True)), strict=True):
        if everywhere:
            here.close_channel(old)


@collective
def agree_on_change(channel: Channel, name: str, change: str) -> None:
    """Agree that the parameters no longer match their plan.

    It takes the place of a step, so that a rank which submits a step gets an error.
    """
    channel.run(Work(Request(STEP, name, (("changed", change),))))
