"""What a strategy for Keras does otherwise than one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.data.sampling import Indices, global_batch, rank_slice, steps_per_epoch
from hvdtrain_compare.protocol.task import Place

Shares = Callable[[Indices, int, Place], list[Indices]]


def exact_shares(order: Indices, batch: int, place: Place) -> list[Indices]:
    """Return this process's part of each global batch; each sample is used once.

    Args:
        order: the samples in the order of the epoch, int64 [n].
    """
    batches = (global_batch(order, n, batch) for n in range(steps_per_epoch(len(order), batch)))
    return [part[rank_slice(len(part), place.rank, place.size)] for part in batches]


def sharded_shares(order: Indices, batch: int, place: Place) -> list[Indices]:
    """Return the batches of tf.data's shard(), as many as all processes can fill.

    Args:
        order: the samples in the order of the epoch, int64 [n].
    """
    own, each = order[place.rank :: place.size], batch // place.size
    return [own[start * each : (start + 1) * each] for start in range(len(order) // batch)]


def exact_test_share(samples: int, place: Place) -> range:
    """Return the test samples of this process; each is evaluated once."""
    part = rank_slice(samples, place.rank, place.size)
    return range(part.start, part.stop)


@dataclass(frozen=True)
class Approach:
    """A strategy for Keras."""

    library: str
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext
    optimizer: Callable[[Any], Any] = lambda optimizer: optimizer
    shares: Shares = exact_shares
    scale: float = 1.0
    callbacks: Sequence[Any] = ()
    notes: list[str] = field(default_factory=list)
