"""The state of an exchange as plain data, which checkpoints hold."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TypedDict

import numpy as np

from hvdtrain.arrays import HostArray
from hvdtrain.core.gradients.exchange import Exchange, ExchangeState

# Counts of the optimizer beside the state of its exchange: mean number of samples of all ranks in a
# step, and number of steps before its own state was reset.
SAMPLES_PER_STEP, FORGOTTEN_STEPS = "samples per step", "forgotten steps"

_logger = logging.getLogger("hvdtrain")


class SavedExchange(TypedDict):
    """The state of an exchange on one rank, as plain data.

    Attributes:
        spec: description of the exchange.
        steps: number of steps that the program has completed.
        ranks: number of ranks that take part.
        shared: arrays that are equal on all ranks, and counts of the optimizer, by name.
        own: arrays of this rank, by name.
    """

    spec: str
    steps: int
    ranks: int
    shared: dict[str, HostArray]
    own: dict[str, HostArray]


def save_exchange(
    exchange: Exchange, steps: int, ranks: int, counts: Mapping[str, float | None]
) -> SavedExchange:
    """Return a copy of the state of an exchange."""
    state = exchange.state()
    known = {name: np.array(count) for name, count in counts.items() if count is not None}
    return SavedExchange(
        spec=exchange.spec,
        steps=steps,
        ranks=ranks,
        shared={**state.shared, **known},
        own=dict(state.own),
    )


def load_exchange(
    exchange: Exchange, saved: SavedExchange, ranks: int, first: bool
) -> tuple[int, dict[str, float]]:
    """Restore an exchange; with another number of ranks, their own arrays start over."""
    if saved["spec"] != exchange.spec:
        raise ValueError(
            f"the state belongs to exchange {saved['spec']!r}, but this is {exchange.spec!r}: "
            "create the optimizer with that exchange, or start without the state"
        )
    shared, own = dict(saved["shared"]), saved["own"]
    counts = {
        name: float(shared.pop(name))
        for name in (SAMPLES_PER_STEP, FORGOTTEN_STEPS)
        if name in shared
    }
    if saved["ranks"] != ranks:
        if own and first:
            _logger.warning(
                f"exchange {exchange.spec!r}: its state was saved by {saved['ranks']} ranks, and "
                f"now there are {ranks}: each rank's private state is reset"
            )
        own = {}
    exchange.load(ExchangeState(shared, own))
    return saved["steps"], counts
