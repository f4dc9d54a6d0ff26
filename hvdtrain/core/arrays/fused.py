"""Fused reductions: the dense gradients of one step as one operation.

A rank may have other gradients than the others, or sparse ones: ranks compare their layouts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeAlias
from weakref import WeakKeyDictionary, ref

import numpy as np

from hvdtrain.arrays import HostArray
from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.config import DEFAULT_BUCKET_BYTES
from hvdtrain.core import context
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.allocators import FindLibrary, placing_slices
from hvdtrain.core.arrays.collectives import (
    Lending,
    MemoryPool,
    aligned_order,
    allreduce,
    empty,
    open_lending,
    wire_type,
)
from hvdtrain.core.bucket_plans import agree_on_bucket_size
from hvdtrain.core.gathers import allocate_if
from hvdtrain.core.gradient_settings import GradientSettings, group_indices
from hvdtrain.core.gradients.communicators import open_communicators
from hvdtrain.core.gradients.exchange import Exchange, FilledBucket, StepInfo
from hvdtrain.core.gradients.plan import (
    ParameterSpec,
    cut,
    first_difference,
    make_plan,
    memory_bytes,
)
from hvdtrain.core.gradients.reducer import Reducer
from hvdtrain.core.gradients.step_info import OwnStep, WeightSums, is_due, note_differences
from hvdtrain.core.objects import allgather_object, broadcast_object
from hvdtrain.core.places import LentBucket
from hvdtrain.core.warnings_once import note_one_node
from hvdtrain.errors import MismatchError
from hvdtrain.topology import format_by_rank
from hvdtrain.types import ReduceOp

# A gradient of this size or more does not stay in the caches until it is reduced.
_LARGE_BYTES = 256 << 10
# TensorFlow computes momenta in the memory of the last results, which they keep for a step.
_LENDING_BLOCKS = 2
_STRIDE = 4096
# Returns what ranks compare of the weights to which gradients belong.
Weights: TypeAlias = Callable[[], WeightSums | None]


DENSE, SPARSE, NONE = "d", "s", "-"


@dataclass(frozen=True)
class Layout:
    kinds: str
    fixed: bool = False

    @property
    def variant(self) -> str:
        """What ranks compare; "" if all gradients are dense."""
        return f", gradients {self.kinds}" if self.kinds.strip(DENSE) else ""

    @property
    def dense(self) -> list[int]:
        """The variables with a dense gradient."""
        return [index for index, kind in enumerate(self.kinds) if kind == DENSE]


# Takes the dense gradients of a layout, the operation's name in a graph, and this rank's weight.
# Returns the reduced gradients, and the factor for this rank's slices.
ReduceArrays: TypeAlias = Callable[
    [Sequence[HostArray], Layout, str | None, float | None], tuple[Sequence[HostArray], float]
]


class LayoutsDifferError(Exception):
    """Ranks have gradients of different layouts; raised on all of them."""

    def __init__(self, ranks: Sequence[int], layouts: Sequence[Layout]) -> None:
        super().__init__("gradients have different layouts on the ranks")
        self._ranks, self._layouts = ranks, layouts

    def agreed(self, names: Sequence[str], operation: str) -> Layout:
        """Return the layout that all ranks use instead, with zeros where a rank has nothing.

        A gradient is dense if it is on any rank, and None if it is on all. Once a function is
        traced, its sparse gradients can become dense, but None cannot become a gradient.
        """
        fixed = any(layout.fixed for layout in self._layouts)
        if len({len(layout.kinds) for layout in self._layouts}) > 1:
            counts = (str(len(layout.kinds)) for layout in self._layouts)
            raise MismatchError(
                f"{operation}: ranks reduce gradients of different numbers of variables: "
                f"{format_by_rank(dict(zip(self._ranks, counts, strict=True)))}. Build the same "
                "model on every rank"
            )
        kinds, columns = "", zip(*(x.kinds for x in self._layouts), strict=True)
        for name, column in zip(names, columns, strict=True):
            present = set(column) - {NONE}
            self._check_traced(name, column, operation)
            mixed = DENSE in present or (fixed and present)
            kinds += DENSE if mixed else SPARSE if present else NONE
        return Layout(kinds, fixed)

    def _check_traced(self, name: str, column: Sequence[str], operation: str) -> None:
        triples = list(zip(self._ranks, column, self._layouts, strict=True))
        having = [rank for rank, kind, _ in triples if kind != NONE]
        lacking = [rank for rank, kind, layout in triples if kind == NONE and layout.fixed]
        if having and lacking:
            raise MismatchError(
                f"{operation}: {name} has a gradient on rank {having[0]}, but none in the function "
                f"that rank {lacking[0]} traced: make the loss depend on the variable on every "
                "rank (add 0 times it), or run eagerly"
            )


@dataclass(frozen=True)
class _Memory:
    pool: MemoryPool
    lending: Lending | None = None


@dataclass
class _Model:
    """What is counted and told of one model; others with equal shapes share its plan."""

    owner: ref[object]  # removes it from the plan
    steps: int = 0  # as all ranks count them
    told: bool = False  # that weights differ


class FusedPlan:
    """Reduces gradients of given shapes and dtypes in buckets.

    All ranks use a plan for the first time together: the request that ranks agree on covers shapes
    and dtypes.
    """

    def __init__(
        self,
        specs: Sequence[ParameterSpec],
        groups: Sequence[Sequence[int]],
        exchange: Exchange,
        channel: Channel,
        bucket_bytes: int,
    ) -> None:
        order = aligned_order([spec.nbytes for spec in specs])
        self._plan = make_plan(specs, bucket_bytes, bucket_bytes, groups, order)
        self._exchange = exchange
        self._exchange.prepare(self._plan)
        self._models: dict[int, _Model] = {}
        self._nbytes = memory_bytes(self._plan).get("cpu", 0)
        self._memory_key = f"plan {self._plan.digest}, {self._exchange.spec}"
        known: _Memory | None = context.current().first_use.find(channel, self._memory_key)
        self._memory = known or _Memory(MemoryPool(empty([self._nbytes], np.uint8)))

    @collective
    def use_engine_memory(self, channel: Channel, allocator: FindLibrary | None) -> None:
        """Allocate the engine's fastest memory, once for all plans of these gradients."""
        granted, cache = [], _cache_of(channel)

        def allocate() -> _Memory | None:
            stride = -(-self._nbytes // _STRIDE) * _STRIDE
            room = cache.in_engine_memory < _MOST_IN_ENGINE_MEMORY
            name, memory = f"for {self._memory_key}", None
            in_place = self._exchange.in_place and placing_slices(channel) is not None
            if allocator is not None and in_place:
                lends, nbytes = room and allocator() is not None, _LENDING_BLOCKS * stride
                memory = channel.run(allocate_if(lends, nbytes, f"{name}, lent"))
            lending = None
            if allocator is not None and memory is not None:
                lending = open_lending(channel, self._plan, memory, allocator, self._memory_key)
            if memory is None:
                memory = channel.run(allocate_if(room, stride, name))
            granted.append(memory is not None)
            if memory is None:
                return None
            blocks = np.asarray(memory).reshape(-1, stride)[:, : self._nbytes]
            return _Memory(MemoryPool(*blocks), lending)

        memory = context.current().first_use.settle(channel, self._memory_key, allocate)
        self._memory = memory or self._memory
        cache.in_engine_memory += any(granted)

    @collective
    def reduce(
        self,
        arrays: Sequence[HostArray],
        name: str,
        channel: Channel,
        own: OwnStep,
        weights: Weights | None = None,
        owner: object = None,
    ) -> tuple[list[HostArray], StepInfo]:
        memory, model = self._memory, self._model_of(owner if weights is not None else self)
        block = memory.pool.allocate()
        buffers = cut(self._plan.buckets, {"cpu": block})
        # Other ranks can write into memory of the node only.
        lending = memory.lending if memory.pool.is_given(block) else None
        placed = None if lending is None else lending.buckets(buffers)
        reducer = Reducer(
            context.current(), channel, self._exchange, name, self._plan, buffers, placed=placed
        )
        if own.number is None:
            own = replace(own, number=model.steps)
        if weights is not None and is_due(model.steps) and not model.told:
            own = replace(own, weights=weights())
        if channel.has_thread:  # reduces the first bucket while this one fills the second
            reducer.submit(own)
        try:
            lent = placed or [None] * len(buffers)
            results = fill(reducer, own, dict(enumerate(arrays)), lending, lent)
        except BaseException:  # Ctrl-C, for example
            reducer.step.abandon()  # else the channel's thread would wait for it
            raise
        reducer.finish(own)
        info = reducer.step.info
        assert info is not None
        model.steps = info.step + 1
        model.told |= note_differences(info.weights, channel, f"at step {model.steps}")
        return [
            results[index].astype(array.dtype, copy=False) for index, array in enumerate(arrays)
        ], info

    def _model_of(self, owner: object) -> _Model:
        key, models = id(owner), self._models  # the callback must not keep the plan
        if key not in models:
            models[key] = _Model(ref(owner, lambda _: models.pop(key, None)))
        return models[key]

    def begin(self, arrays: Sequence[HostArray]) -> None:
        buffers = cut(self._plan.buckets, {"cpu": self._memory.pool.allocate()})
        pairs = zip(self._plan.buckets, buffers, strict=True)
        for number, (bucket, buffer) in enumerate(pairs):
            elements = buffer.array()
            for index, start in zip(bucket.parameters, bucket.starts, strict=True):
                elements[start : start + arrays[index].size] = arrays[index].reshape(-1)
            self._exchange.begin(FilledBucket(number, buffer, bucket, self._plan.specs))


def fill(
    reducer: Reducer,
    own: OwnStep,
    arrays: Mapping[int, HostArray],
    lending: Lending | None,
    lent: Sequence[LentBucket | None],
) -> dict[int, HostArray]:
    """Copy or lend gradients to the buckets, zeros for others; return a view of each, by index."""
    results = {}
    rows = zip(reducer.plan.buckets, reducer.buffers, lent, strict=True)
    for bucket, buffer, lends in rows:
        if lends is not None:
            lends.clear()
        elements = buffer.array()
        for index, start in zip(bucket.parameters, bucket.starts, strict=True):
            spec, array = reducer.plan.specs[index], arrays.get(index)
            view = elements[start : start + spec.count].reshape(spec.shape)
            if array is None:
                view.fill(0)
            elif lending is not None and lending.lend(lends, index, array):
                pass
            elif view.dtype == array.dtype and view.nbytes >= _LARGE_BYTES:
                whole = np.ascontiguousarray(array)
                reducer.channel.communicator.put(Buffer.from_array(whole), Buffer.from_array(view))
            else:
                np.copyto(view, array, casting="unsafe")
            results[index] = view
            reducer.step.mark_ready(index)
        if reducer.launch():
            reducer.submit(own)
    return results


# Limits per channel: plans in memory of the engine, and plans that are cached.
_MOST_IN_ENGINE_MEMORY, _MOST_CACHED = 16, 32

# What a rank without dense gradients reduces.
_NOTHING: HostArray = np.zeros(1, np.float32)


@collective
def begin_fused(
    weights: Sequence[HostArray], parameters: Sequence[object], settings: GradientSettings
) -> None:
    """Pass the weights that all ranks have in common to their exchange (collective at first)."""
    chosen = [i for i, parameter in enumerate(parameters) if not is_overwritten(parameter)]
    weights, parameters = [weights[i] for i in chosen], [parameters[i] for i in chosen]
    _plan_for(_specs(weights), parameters, settings).begin(weights)


def is_overwritten(parameter: object) -> bool:
    """Return whether a variable becomes what comes as its gradient: in Keras, scales of float8."""
    return bool(getattr(parameter, "overwrite_with_gradient", False))


@collective
def exchange_fused(
    arrays: Sequence[HostArray],
    parameters: Sequence[object],
    name: str,
    settings: GradientSettings,
    own: OwnStep,
    layout: Layout | None = None,
    weights: Weights | None = None,
) -> tuple[list[HostArray], StepInfo]:
    """Exchange gradients or weights as one operation; ranks compare `weights` now and then.

    Gradients that overwrite a variable are reduced by maximum, as Keras does when it accumulates.
    """
    overwritten = [i for i, parameter in enumerate(parameters) if is_overwritten(parameter)]
    if overwritten:
        others = sorted({*range(len(arrays))}.difference(overwritten))
        given, owners = [arrays[i] for i in others], [parameters[i] for i in others]
        own = replace(own, variant=f", {len(overwritten)} that overwrite")  # the same on all ranks
        reduced, info = exchange_fused(given, owners, name, settings, own, layout, weights)
        given, members = [arrays[i] for i in overwritten], settings.process_set
        reduced += allreduce(given, ReduceOp.MAX, f"{name}_largest", 1.0, 1.0, members)
        found = dict(zip([*others, *overwritten], reduced, strict=True))
        return [found[i] for i in range(len(arrays))], info
    if not arrays:  # other ranks may have some, and are to learn that this one has none
        _settle(settings.process_set.channel(), settings.make_exchange())
        plain = replace(settings, exchange=None, groups=None)
        return [], exchange_fused([_NOTHING], [_NOTHING], name, plain, own, layout)[1]
    specs = _specs(arrays)
    channel = settings.process_set.channel()
    plan = _plan_for(specs, parameters, settings)
    own = replace(own, variant=own.variant + (layout.variant if layout else ""))
    try:
        results = plan.reduce(arrays, name, channel, own, weights, parameters[0])
    except MismatchError:
        _raise_difference(specs, layout, name, channel)  # if that is the reason
        raise
    with suppress(MismatchError):  # a rank has joined: ask again next time
        plan.use_engine_memory(channel, settings.allocator)
    return results


@collective
def reduce_present(
    gradients: Sequence[HostArray | None],
    names: Sequence[str],
    operation: str,
    zeros: Callable[[int], HostArray],
    reduce: Callable[[Sequence[HostArray], Layout], Sequence[HostArray]],
    fixed: bool = False,
) -> list[HostArray | None]:
    """Reduce gradients where some ranks have only some of them."""
    layout = Layout("".join(NONE if g is None else DENSE for g in gradients), fixed)
    given = dict(enumerate(gradients))
    try:
        reduced = reduce([g for g in gradients if g is not None], layout)
    except LayoutsDifferError as differ:
        layout = differ.agreed(names, operation)
        own = [(index, given[index]) for index in layout.dense]
        reduced = reduce([zeros(i) if each is None else each for i, each in own], layout)
    results = dict(zip(layout.dense, reduced, strict=True))
    return [results.get(index) for index in range(len(gradients))]


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


@collective
def _plan_for(
    specs: list[ParameterSpec], parameters: Sequence[object], settings: GradientSettings
) -> FusedPlan:
    groups = group_indices(settings.groups, parameters)
    channel, exchange = settings.process_set.channel(), settings.make_exchange()
    _check_exchange(specs, parameters, exchange, channel)
    key: Hashable = (tuple(specs), groups, exchange.spec if exchange.stateless else exchange)
    cache = _cache_of(channel)
    plan = cache.plans.get(key)
    if plan is not None:
        return plan
    settled = _settle(channel, exchange)
    plan = FusedPlan(specs, groups, exchange, channel, settled or DEFAULT_BUCKET_BYTES)
    if settled:
        cache.add(key, plan)
    return plan


@collective
def _settle(channel: Channel, exchange: Exchange) -> int | None:
    """Open what all plans share, and return the bucket size; None if ranks differ.

    The step itself then says why, or a rank that has joined answers it, which it does only there.
    """
    here, name = context.current(), "communicators"
    try:
        nbytes = agree_on_bucket_size(channel).nbytes
        if exchange.hierarchical:
            opened = here.first_use.settle(
                channel,
                name,
                lambda: open_communicators(channel, exchange.spec, here.topology.node, name),
            )
            note_one_node(exchange, opened)
    except MismatchError:
        return None
    return nbytes


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
            f"exchange {exchange.spec!r} got {len(known)} gradients before, and {len(specs)} or "
            "different ones now: use one exchange object per optimizer, with the same gradients in "
            "every step"
        )


@collective
def _raise_difference(
    specs: list[ParameterSpec], layout: Layout | None, name: str, channel: Channel
) -> None:
    """Raise an error for the first gradient that differs from the first rank's."""
    size, root_rank = context.current().topology.size, channel.ranks[0]
    what = f"shapes for {name}"
    differences: list[str | None] = []
    with suppress(MismatchError):  # a rank has joined: the error that led here says so
        if layout is not None:
            layouts = allgather_object(layout, f"layouts for {name}", channel)
            if len({each.kinds for each in layouts}) > 1:
                raise LayoutsDifferError(channel.ranks, layouts)
        theirs = broadcast_object(specs, root_rank, what, channel)
        differences = allgather_object(first_difference(specs, theirs, root_rank), what, channel)
    for rank, difference in zip(channel.ranks, differences, strict=False):
        if difference is not None:
            raise MismatchError(
                f"[rank {rank}/{size}] {name}: {difference}. Build the same model on every rank"
            )


def _specs(arrays: Sequence[HostArray]) -> list[ParameterSpec]:
    # Named by position: names of TensorFlow's variables depend on what else a rank has created.
    return [
        ParameterSpec.of_array(f"gradient {n}", a.shape, wire_type(a.dtype).name, a.dtype.name)
        for n, a in enumerate(arrays)
    ]
