"""Reductions of one array, planned once for calls that differ in their data only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from hvdtrain.arrays import HostArray
from hvdtrain.collective import collective
from hvdtrain.core import context, operations
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.agreement.request import UNNAMED
from hvdtrain.core.arrays.memory import as_buffer
from hvdtrain.core.collectives.prepared_allreduce import PreparedAllreduce
from hvdtrain.core.process_set import ProcessSet, channel_of, require_process_set
from hvdtrain.types import ReduceOp

# Programs that give each call another name must not fill the memory.
_MOST_PLANS = 2048

# Name, reduction, factors, process set, dtype and shape.
Key: TypeAlias = tuple[
    str | None, ReduceOp, float, float, ProcessSet, np.dtype[Any], tuple[int, ...]
]


@dataclass(slots=True)
class ArrayPlan:
    """A reduction that was accepted before."""

    channel: Channel
    prepared: PreparedAllreduce

    @collective
    def run(self, source: HostArray, result: HostArray) -> bool:
        """Reduce an array if nothing else is pending; return whether it was done."""
        return operations.run_prepared(self.channel, self.prepared, (source, result))


def find_plan(key: Key) -> ArrayPlan | None:
    """Return the plan for a call, if there is one."""
    require_process_set(key[4])
    return context.current().plans.get((ArrayPlan, key))


def keep_plan(key: Key, sent: HostArray, wire_op: ReduceOp, kind: str) -> None:
    """Keep a plan for calls like one that was accepted."""
    name, _, prescale, postscale, process_set, *_ = key
    plans, channel = context.current().plans, channel_of(process_set)
    if len(plans) >= _MOST_PLANS or not sent.size:
        return
    prepared = PreparedAllreduce(
        channel.communicator,
        sent,
        sent.shape,
        wire_op,
        str(name) if name else f"{UNNAMED}0",
        prescale,
        postscale,
        as_buffer,
        _address,
        None if name else partial(channel.name, "allreduce", None),
        kind,
    )
    plans[ArrayPlan, key] = ArrayPlan(channel, prepared)


def _address(array: HostArray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
