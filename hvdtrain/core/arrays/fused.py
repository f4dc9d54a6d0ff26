"""Fused reduction of the dense gradients of a step."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from contextlib import suppress
from math import prod
from weakref import WeakKeyDictionary

from hvdtrain.config import DEFAULT_BUCKET_BYTES
from hvdtrain.core import context
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.arrays.fused_plan import FusedPlan, FusedSettings
from hvdtrain.core.arrays.memory import Array, wire_type
from hvdtrain.core.bucket_plans import agree_on_bucket_size
from hvdtrain.core.gradients.exchange import Exchange
from hvdtrain.core.gradients.plan import ParameterSpec, first_difference
from hvdtrain.core.objects import allgather_object, broadcast_object
from hvdtrain.errors import MismatchError
from hvdtrain.types import DType

__all__ = ["reduce_fused"]

# How many plans get engine memory, and how many are kept.
_MOST_IN_ENGINE, _MOST_KEPT = 16, 32


def reduce_fused(
    arrays: Sequence[Array], name: str, settings: FusedSettings, weight: float | None = None
) -> list[Array]:
    """Return the reduced gradients (collective, blocking).

    Their memory is reused only when no array refers to it any more.

    Args:
        arrays: gradients of this rank, of any shape and floating-point dtype.
        name: name of the operation, equal on all ranks.
        settings: settings of the reduction, equal on all ranks.
        weight: weight of this rank in the average, e.g. its number of samples; None for 1.

    Returns:
        Arrays with the shapes and dtypes of `arrays`.

    Raises:
        MismatchError: the ranks have gradients of different number, shapes or types.
        ValueError: the exchange was used for other gradients before.
    """
    specs = _specs(arrays)
    channel = settings.process_set.channel()
    fused = _kept_or_made(specs, settings, channel)
    try:
        results = fused.reduce(arrays, name, channel, weight)
    except MismatchError:
        _raise_difference(specs, name, channel)  # a clearer error, if gradients differ
        raise
    _use_engine_memory(fused, channel)
    return results


class _Kept:
    """The plans of a channel.

    Attributes:
        fused: latest plans; a search over models makes many, one after the other.
        in_engine: number of plans that were given engine memory, which lasts until shutdown().
        exchanged: gradients for which each exchange is used.
    """

    def __init__(self) -> None:
        self.fused: dict[Hashable, FusedPlan] = {}
        self.in_engine = 0
        self.exchanged: WeakKeyDictionary[Exchange, list[ParameterSpec]] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def keep(self, key: Hashable, fused: FusedPlan) -> None:
        """Keep a plan, and drop the oldest one if there are too many (local).

        Args:
            key: gradients and settings of the plan.
            fused: plan to keep.
        """
        with self._lock:
            self.fused[key] = fused
            if len(self.fused) > _MOST_KEPT:
                del self.fused[next(iter(self.fused))]


def _kept(channel: Channel) -> _Kept:
    kept: _Kept = context.current().kept.setdefault(channel, {}).setdefault(_Kept, _Kept())
    return kept


def _kept_or_made(
    specs: list[ParameterSpec], settings: FusedSettings, channel: Channel
) -> FusedPlan:
    key: Hashable = (tuple(specs), settings)
    fused = _kept(channel).fused.get(key)
    if fused is not None:
        return fused
    _check_exchange(specs, settings.exchange, channel)
    try:
        made = FusedPlan(specs, settings, agree_on_bucket_size(channel).nbytes)
    except MismatchError:  # a joined rank takes part in steps only: try again next time
        return FusedPlan(specs, settings, DEFAULT_BUCKET_BYTES)
    _kept(channel).keep(key, made)
    return made


def _check_exchange(
    specs: list[ParameterSpec], exchange: Exchange | None, channel: Channel
) -> None:
    if exchange is None:
        return
    known = _kept(channel).exchanged.setdefault(exchange, specs)
    if known != specs:
        raise ValueError(
            f"exchange {exchange.spec!r} was given {len(known)} gradients before, and now "
            f"{len(specs)} or others: it goes with one optimizer, whose gradients are the same in "
            "each step"
        )


def _use_engine_memory(fused: FusedPlan, channel: Channel) -> None:
    kept = _kept(channel)
    with suppress(MismatchError):  # a rank has joined: try again next time
        if fused.use_engine_memory(channel, lambda: kept.in_engine < _MOST_IN_ENGINE):
            kept.in_engine += 1


def _raise_difference(specs: list[ParameterSpec], name: str, channel: Channel) -> None:
    """Raise an error for the first difference from the first rank's gradients (collective)."""
    size, root_rank = context.current().topology.size, channel.ranks[0]
    what = f"shapes for {name}"
    theirs = broadcast_object(specs, root_rank, what, channel)
    differences = allgather_object(first_difference(specs, theirs, root_rank), what, channel)
    for rank, difference in zip(channel.ranks, differences, strict=True):
        if difference is not None:
            raise MismatchError(
                f"[rank {rank}/{size}] {name}: {difference}. Build the same model on every rank"
            )


def _specs(arrays: Sequence[Array]) -> list[ParameterSpec]:
    # Positions as names: TensorFlow's names of variables depend on others that a rank has created.
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
