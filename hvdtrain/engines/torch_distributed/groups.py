"""Process groups of torch.distributed.

They are created from their classes, without torch.distributed's global state: a script may use
that state itself, only the members create a subgroup, and ranks keep the given order.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hvdtrain.collective import collective
from hvdtrain.engines.torch_distributed.failures import TorchFailures

# How long ranks wait for each other when they connect. Later waits are unlimited, because the core
# detects late ranks, and the network ranks that have ended.
_CONNECT = timedelta(seconds=300)
_FOREVER = timedelta(days=365)


@dataclass(frozen=True)
class Members:
    """The ranks that form a communicator, and how they find each other."""

    store: dist.Store
    rank: int
    size: int
    device: dist.ProcessGroupGloo.Device
    cuda: bool
    halves_in_float32: bool
    abort: Callable[[int], None]
    leave: Callable[[], None]
    failures: TorchFailures | None = None


def device_at(address: str) -> dist.ProcessGroupGloo.Device:
    """Create gloo's device for all connections of this rank, at an address of this host."""
    return dist.ProcessGroupGloo.create_device(hostname=address)


@collective
def gloo_group(members: Members) -> dist.ProcessGroupGloo:
    """Create the gloo group of the members."""
    kind: Any = dist.ProcessGroupGloo
    options = kind._Options()
    options._timeout = _CONNECT
    options._devices = [members.device]
    failures = members.failures
    # It must stay referenced from Python until the group is connected.
    store = members.store if failures is None else failures.watched(members.store)

    def make() -> dist.ProcessGroupGloo:
        prefixed = dist.PrefixStore("gloo", store)
        group: dist.ProcessGroupGloo = kind(prefixed, members.rank, members.size, options)
        group._set_default_timeout(_FOREVER)
        return group

    return make() if failures is None else failures.connect(make)


@collective
def nccl_group(members: Members, device: torch.device) -> dist.ProcessGroupNCCL:
    """Create the NCCL group of the members, and connect their GPUs."""
    if members.failures is not None:
        # By default a process ends when another one has ended.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _FOREVER
    store = dist.PrefixStore("nccl", members.store)

    def make() -> dist.ProcessGroupNCCL:
        group = dist.ProcessGroupNCCL(store, members.rank, members.size, options)
        # Otherwise NCCL would connect during the first operation.
        group.eager_connect_single_device(device)
        return group

    return make() if members.failures is None else members.failures.connect(make)
