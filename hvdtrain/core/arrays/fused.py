"""Fused reductions: the dense gradients of one step as one operation."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod
from weakref import WeakKeyDictionary, ref

import numpy as np

from hvdtrain.arrays import HostArray
from hvdtrain.collective import collective
from hvdtrain.config import DEFAULT_BUCKET_BYTES
from hvdtrain.core import context
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.allocators.opening import FindLibrary
from hvdtrain.core.arguments import group_indices
from hvdtrain.core.arrays.fused_plan import FusedPlan, OwnStep
from hvdtrain.core.arrays.layouts import Layout, LayoutsDifferError
from hvdtrain.core.arrays.memory import wire_type
from hvdtrain.core.bucket_plans import agree_on_bucket_size
from hvdtrain.core.gradient_settings import GradientSettings
from hvdtrain.core.gradients.communicators import Communicators, open_communicators
from hvdtrain.core.gradients.exchange import Exchange, StepInfo
from hvdtrain.core.gradients.plan import ParameterSpec, first_difference
from hvdtrain.core.objects import allgather_object, broadcast_object
from hvdtrain.errors import MismatchError
from hvdtrain.types import DType

# Limits per channel: plans in memory of the engine, and plans that are cached.
_MOST_IN_ENGINE_MEMORY, _MOST_CACHED = 16, 32

# What a rank without dense gradients reduces.
_NOTHING: HostArray = np.zeros(1, np.float32)


@collective
def reduce_fused(
    arrays: Sequence[HostArray],
    parameters: Sequence[object],
    name: str,
    settings: GradientSettings,
    weight: float | None = None,
    step: int | None = None,
    layout: Layout | None = None,
) -> list[HostArray]:
    """Reduce dense gradients as one operation."""
    own = OwnStep(weight, step)
    return exchange_fused(arrays, parameters, name, settings, own, layout)[0]


@collective
def begin_fused(
    weights: Sequence[HostArray], parameters: Sequence[object], settings: GradientSettings
) -> None:
    """Pass the weights that all ranks have in common to their exchange (collective at first)."""
    _plan_for(_specs(weights), parameters, settings).begin(weights)


@collective
def exchange_fused(
    arrays: Sequence[HostArray],
    parameters: Sequence[object],
    name: str,
    settings: GradientSettings,
    own: OwnStep,
    layout: Layout | None = None,
) -> tuple[list[HostArray], StepInfo]:
    """Exchange gradients or weights as one operation."""
    if not arrays:  # other ranks may have some, and are to learn that this one has none
        plain = replace(settings, exchange=None, groups=None)
        return [], exchange_fused([_NOTHING], [_NOTHING], name, plain, own, layout)[1]
    specs = _specs(arrays)
    channel = settings.process_set.channel()
    plan = _plan_for(specs, parameters, settings)
    try:
        results = plan.reduce(arrays, name, channel, own, layout.variant if layout else "")
    except MismatchError:
        _raise_difference(specs, layout, name, channel)  # if that is the reason
        raise
    _use_engine_memory(plan, channel, settings.allocator)
    return results


class _PlanCache:
    """Plans of a channel, the latest ones: a search through models has many in succession."""

    def __init__(self) -> None:
        self.plans: dict[Hashable, FusedPlan] = {}
        self.in_engine_memory = 0
        self.exchanged: WeakKeyDictionary[
            Exchange, tuple[list[ParameterSpec], list[ref[object]]]
        ] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def add(self, key: Hashable, plan: FusedPlan) -> None:
        """Add a plan, and drop the oldest one if there are too many."""
        with self._lock:
            self.plans[key] = plan
            if len(self.plans) > _MOST_CACHED:
                del self.plans[next(iter(self.plans))]


def _cache_of(channel: Channel) -> _PlanCache:
    caches = context.current().kept.setdefault(channel, {})
    cache: _PlanCache = caches.setdefault(_PlanCache, _PlanCache())
    return cache


def _plan_for(
    specs: list[ParameterSpec], parameters: Sequence[object], settings: GradientSettings
) -> FusedPlan:
    groups = group_indices(settings.groups, parameters)
    channel, exchange = settings.process_set.channel(), settings.make_exchange()
    _check_exchange(specs, parameters, exchange, channel)
    return _cached_plan(specs, groups, exchange, channel)


def _cached_plan(
    specs: list[ParameterSpec],
    groups: tuple[tuple[int, ...], ...],
    exchange: Exchange,
    channel: Channel,
) -> FusedPlan:
    key: Hashable = (tuple(specs), groups, exchange.spec if exchange.stateless else exchange)
    cache = _cache_of(channel)
    plan = cache.plans.get(key)
    if plan is not None:
        return plan
    try:
        bucket_bytes = agree_on_bucket_size(channel).nbytes
        communicators = _communicators(channel, exchange)
    except MismatchError:  # a joined rank answers steps only: ask again next time
        return FusedPlan(specs, groups, exchange, channel, DEFAULT_BUCKET_BYTES)
    plan = FusedPlan(specs, groups, exchange, channel, bucket_bytes, communicators)
    cache.add(key, plan)
    return plan


@collective
def _communicators(channel: Channel, exchange: Exchange) -> Communicators | None:
    """Return the communicators of an exchange, shared by all plans (collective on first use)."""
    here = context.current()
    if not exchange.hierarchical:
        return None
    name = "communicators"
    communicators: Communicators = here.first_use.settle(
        channel,
        name,
        lambda: open_communicators(channel, exchange.spec, here.topology.node, name),
    )
    return communicators


def _check_exchange(
    specs: list[ParameterSpec],
    parameters: Sequence[object],
    exchange: Exchange,
    channel: Channel,
) -> None:
    """Check that an exchange gets what it has state for: names tell no more than the order."""
    if exchange.stateless:
        return
    own = specs, [ref(parameter) for parameter in parameters]
    known, theirs = _cache_of(channel).exchanged.setdefault(exchange, own)
    if known != specs or any(a() is not b for a, b in zip(theirs, parameters, strict=True)):
        raise ValueError(
            f"exchange {exchange.spec!r} was given {len(known)} gradients before, and now "
            f"{len(specs)} or others: it goes with one optimizer, whose gradients are the same in "
            "each step"
        )


def _use_engine_memory(plan: FusedPlan, channel: Channel, allocator: FindLibrary | None) -> None:
    cache = _cache_of(channel)

    def wanted() -> bool:
        return cache.in_engine_memory < _MOST_IN_ENGINE_MEMORY

    with suppress(MismatchError):  # a rank has joined: ask again next time
        if plan.use_engine_memory(channel, wanted, allocator):
            cache.in_engine_memory += 1


@collective
def _raise_difference(
    specs: list[ParameterSpec], layout: Layout | None, name: str, channel: Channel
) -> None:
    """Raise an error for the first gradient that differs from the first rank's."""
    if layout is not None:
        layouts = allgather_object(layout, f"layouts for {name}", channel)
        if len({each.kinds for each in layouts}) > 1:
            raise LayoutsDifferError(channel.ranks, layouts)
    size, root_rank = context.current().topology.size, channel.ranks[0]
    what = f"shapes for {name}"
    theirs = broadcast_object(specs, root_rank, what, channel)
    differences = allgather_object(first_difference(specs, theirs, root_rank), what, channel)
    for rank, difference in zip(channel.ranks, differences, strict=True):
        if difference is not None:
            raise MismatchError(
                f"[rank {rank}/{size}] {name}: {difference}. Build the same model on every rank"
            )


def _specs(arrays: Sequence[HostArray]) -> list[ParameterSpec]:
    # Named by position: names of TensorFlow's variables depend on what else a rank has created.
    return [
        ParameterSpec(
            name=f"gradient {number}",
            shape=array.shape,
            strides=tuple(prod(array.shape[axis + 1 :]) for axis in range(array.ndim)),
            dtype=DType(wire_type(array.dtype).name),
            kind=array.dtype.name,
            device="cpu",
        )
        for number, array in enumerate(arrays)
    ]
