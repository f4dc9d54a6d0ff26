"""The strategies by name."""

from __future__ import annotations

from hvdtrain.compare.protocol.strategy import Strategy
from hvdtrain.compare.strategies import ddp, hvdtrain, one

__all__ = ["REFERENCE", "STRATEGIES", "find_strategy"]

# What all others are compared with; it always runs.
REFERENCE = one.STRATEGY
STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy for strategy in (hvdtrain.STRATEGY, ddp.STRATEGY)
}


def find_strategy(name: str) -> Strategy:
    """Return the strategy of this name, the reference included."""
    return REFERENCE if name == REFERENCE.name else STRATEGIES[name]
