"""Channels of plans, on which steps travel beside all other operations."""

from __future__ import annotations

from hvdtrain.core import context
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.objects import allgather_object

__all__ = ["close_unused_plans", "open_plan_channel"]


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
