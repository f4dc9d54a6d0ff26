"""The state of an exchange: arrays of parameters from step to step, and data in checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import TypedDict

import numpy as np

from hvdtrain.arrays import Array, HostArray, copy, like, to_host, zeros_like
from hvdtrain.core.gradients.exchange import Exchange, ExchangeState, FilledBucket


class ParameterState:
    """One array for each parameter, initially zeros, on the device of its bucket.

    Parameters are known by their names, because a plan that is made again, e.g. after a layer was
    unfrozen, gives them other indices. Arrays that are put during a step take effect at its end,
    and only if it is valid. `quantity` says in checkpoints what they are, without a dot.
    """

    def __init__(self, quantity: str) -> None:
        self._quantity = quantity
        self._arrays: dict[str, Array] = {}
        self._new: dict[str, Array] = {}
        self._loaded: dict[str, HostArray] = {}

    def holds(self, name: str) -> bool:
        """Return whether the array of a parameter was ever put or loaded."""
        return name in self._arrays or name in self._loaded

    def get(self, name: str, model: Array) -> Array:
        """Return the array of a parameter; a new one has the shape, dtype and device of `model`."""
        if name in self._loaded:
            self._arrays[name] = like(self._loaded.pop(name), model)
        elif name not in self._arrays:
            self._arrays[name] = zeros_like(model)
        return self._arrays[name]

    def put(self, name: str, array: Array) -> None:
        """Replace the array of a parameter when the step ends; do not modify it afterwards."""
        self._new[name] = array

    def keep(self, bucket: FilledBucket) -> None:
        """Replace the arrays of a bucket's parameters by copies of their elements, at once."""
        self._arrays |= {part.name: copy(part.array) for part in bucket.parts}

    def end(self, keep: bool = True, unused: Collection[str] = ()) -> None:
        """Accept the arrays that were put during a valid step, but not of `unused` parameters."""
        if keep:
            self._arrays |= {n: array for n, array in self._new.items() if n not in unused}
        self._new = {}

    def arrays(self) -> dict[str, HostArray]:
        """Return copies of all arrays by name, for a checkpoint."""
        kept = self._loaded | {name: to_host(array) for name, array in self._arrays.items()}
        return {f"{self._quantity}.{name}": array for name, array in kept.items()}

    def load(self, arrays: Mapping[str, HostArray]) -> None:
        """Restore arrays that arrays() has returned; those of other quantities are ignored."""
        self._arrays, self._new, self._loaded = {}, {}, {}
        for key, array in arrays.items():
            quantity, _, name = key.partition(".")
            if quantity == self._quantity:
                self._loaded[name] = array


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
