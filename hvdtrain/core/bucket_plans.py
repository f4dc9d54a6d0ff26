"""Agreement of the ranks on bucket plans, their sizes and their channels."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.config import DEFAULT_BUCKET_BYTES
from hvdtrain.core import context, operations
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.agreement.operation import Operation
from hvdtrain.core.agreement.request import Request
from hvdtrain.core.gradients.bucket_size import (
    BucketSize,
    MeasureAllreduce,
    choose_bucket_size,
    size_text,
)
from hvdtrain.core.gradients.plan import (
    STEP,
    BucketPlan,
    ParameterSpec,
    first_difference,
    make_plan,
    plan_of_layout,
)
from hvdtrain.core.objects import allgather_object, broadcast_object
from hvdtrain.core.operations import Submission
from hvdtrain.engines.communicator import Communicator
from hvdtrain.errors import MismatchError

__all__ = [
    "agree_on_bucket_size",
    "agree_on_change",
    "agree_on_plan",
    "close_unused_plans",
    "open_plan_channel",
    "replan",
    "take_layout",
    "use_bucket_size",
]

_logger = logging.getLogger("hvdtrain")

# Why buckets are as large as they are, where a checkpoint says so.
_AS_BEFORE = "as before the run went on"


def agree_on_bucket_size(channel: Channel) -> BucketSize:
    """Return the limit of a bucket, as the set's first rank was given it or as measured once.

    Collective over the channel's ranks. One rank alone has the default.
    """
    kept = context.current().bucket_sizes.get(channel)
    if kept is not None:
        return kept
    return context.current().first_use.settle(
        channel, "bucket size", lambda: _agree_on_bucket_size(channel)
    )


def _agree_on_bucket_size(channel: Channel) -> BucketSize:
    here = context.current()
    # Ranks on other hosts may not have the first one's environment.
    given = broadcast_object(here.config.bucket_bytes, channel.ranks[0], "bucket size", channel)
    if given is not None:
        size = BucketSize(given, "as set")
    elif len(channel.ranks) == 1:
        size = BucketSize(DEFAULT_BUCKET_BYTES, "the default for one rank")
    else:
        size = choose_bucket_size(operations.Submission(channel, MeasureAllreduce()).run())
    here.bucket_sizes[channel] = size
    return size


def use_bucket_size(nbytes: int | None, channel: Channel) -> None:
    """Cut buckets as large as those of an earlier run were, whatever is set or measured now.

    Collective over the channel's ranks, before their first reduction; the first rank's size counts,
    and None changes nothing. What the size was: `context.current().bucket_sizes[channel].nbytes`.
    """
    nbytes = broadcast_object(nbytes, channel.ranks[0], "bucket size", channel)
    if nbytes is not None:
        context.current().bucket_sizes[channel] = BucketSize(nbytes, _AS_BEFORE)


def agree_on_plan(
    specs: list[ParameterSpec],
    channel: Channel,
    groups: Sequence[Sequence[int]] = (),
) -> BucketPlan:
    """Make the plan of the set's first rank on every rank (collective).

    That rank tells the logger "hvdtrain" about it.

    Args:
        specs: the parameters, in the order of the model.
        channel: of the ranks that share the plan.
        groups: indices of parameters that are reduced together, instead of by size.

    Raises:
        MismatchError: the parameters of a rank differ from the first rank's; the first is named.
    """
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


def take_layout(plan: BucketPlan, layout: Mapping[str, Any] | None, channel: Channel) -> BucketPlan:
    """Return the plan with the layout that the channel's first rank has (collective).

    Args:
        plan: of the parameters.
        layout: of an earlier plan; None, on that rank, leaves the plan as it is.
        channel: of the ranks that share the plan.

    Raises:
        ValueError: it is a layout of other parameters.
    """
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


def replan(plan: BucketPlan, places: Sequence[int]) -> BucketPlan:
    """Make a plan for the order in which gradients came.

    Args:
        plan: the first one.
        places: for each parameter its place in that order, summed over ranks.
    """
    order = sorted(range(len(places)), key=lambda index: (places[index], -index))
    return make_plan(plan.specs, plan.bucket_bytes, plan.first_bucket_bytes, plan.groups, order)


def open_plan_channel(parent: Channel) -> Channel:
    """Make a channel with the members of `parent` (collective over them).

    Without threads that is `parent`: a rank that waits in one channel would serve no other.
    """
    if not parent.has_thread:
        return parent
    close_unused_plans(parent)
    here = context.current()
    channel = here.open_channel(range(len(parent.ranks)), f"bucket plan of {parent.label}", parent)
    assert channel is not None  # every rank of the parent is a member
    return channel


def close_unused_plans(parent: Channel) -> None:
    """Give back the channels of plans that no member needs any more (collective over them).

    A communicator can only be freed by all its members together, and each MPI has but so many.
    """
    here = context.current()
    mine = [c for c in here.channels() if c.parent is parent]
    unused = allgather_object([c.unused for c in mine], "unused plans", parent)
    for old, everywhere in zip(mine, map(all, zip(*unused, strict=True)), strict=True):
        if everywhere:
            here.close_channel(old)


class _PlanChange(Operation):
    """Stands where a step of the plan would, so that a rank which steps finds out."""

    def __init__(self, name: str, change: str) -> None:
        super().__init__()
        self.request = Request(STEP, name, (("changed", change),))

    def execute(self, communicator: Communicator) -> None:
        pass


def agree_on_change(channel: Channel, name: str, change: str) -> None:
    """Return when every rank has noticed the same change (collective, instead of a step).

    Args:
        channel: of the plan.
        name: of the plan, which the parameters have outgrown.
        change: what has changed, equal on all ranks.

    Raises:
        MismatchError: another rank takes a step of the plan, or its parameters changed otherwise.
    """
    Submission(channel, _PlanChange(name, change)).run()
