"""Process groups of torch.distributed.

They are made from their classes, without torch.distributed's global state: a script may use that
for itself, a subgroup concerns its members only, and ranks keep the order they are given in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

__all__ = ["Members", "device_at", "gloo_group", "nccl_group"]

# How long ranks may come apart to where they connect; all later waiting is unlimited, because
# the core knows who is late and the network says who is dead.
_CONNECT = timedelta(seconds=300)
_FOREVER = timedelta(days=365)


@dataclass(frozen=True)
class Members:
    """The ranks that form a communicator, and how they find each other.

    Attributes:
        store: where they exchange addresses; nobody else writes to it.
        rank: the number of this rank among them.
        size: how many there are.
        device: gloo's end of this rank's connections.
        cuda: whether NCCL moves what lies in CUDA memory.
        halves_in_float32: whether NCCL adds halves in float32, if one rank wants it.
        abort: ends every rank of the job with an exit code.
        leave: gives back what the world was built with.
    """

    store: dist.Store
    rank: int
    size: int
    device: Any
    cuda: bool
    halves_in_float32: bool
    abort: Callable[[int], None]
    leave: Callable[[], None]


def device_at(address: str) -> Any:
    """Open gloo's end of all connections of this rank, at an address of this host."""
    return dist.ProcessGroupGloo.create_device(hostname=address)


def gloo_group(members: Members) -> Any:
    kind: Any = dist.ProcessGroupGloo
    options = kind._Options()
    options._timeout = _CONNECT
    options._devices = [members.device]
    store = dist.PrefixStore("gloo", members.store)
    group = kind(store, members.rank, members.size, options)
    group._set_default_timeout(_FOREVER)
    return group


def nccl_group(members: Members) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _FOREVER
    store = dist.PrefixStore("nccl", members.store)
    return dist.ProcessGroupNCCL(store, members.rank, members.size, options)
