"""The strategies by name, for each framework."""

from __future__ import annotations

from collections.abc import Mapping

from hvdtrain_compare.protocol import Strategy
from hvdtrain_compare.strategies import keras, torch

_REFERENCES = {"torch": torch.REFERENCE, "keras": keras.REFERENCE}
_STRATEGIES: Mapping[str, tuple[Strategy, ...]] = {
    "torch": torch.STRATEGIES,
    "keras": keras.STRATEGIES,
}


def reference_of(framework: str) -> Strategy:
    """Return what all others are compared with; it always runs."""
    return _REFERENCES[framework]


def strategies_of(framework: str) -> Mapping[str, Strategy]:
    """Return the strategies of a framework by name."""
    return {strategy.name: strategy for strategy in _STRATEGIES[framework]}


def find_strategy(framework: str, name: str) -> Strategy:
    """Return the strategy of this name, the reference included."""
    reference = reference_of(framework)
    return reference if name == reference.name else strategies_of(framework)[name]
