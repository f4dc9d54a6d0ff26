"""The strategies by name."""

from __future__ import annotations

from hvdtrain.compare.protocol.strategy import Strategy
from hvdtrain.compare.strategies import (
    accelerate,
    ddp,
    dp,
    fsdp2,
    horovod,
    hvdtrain,
    one,
    torch_postlocal,
)

__all__ = ["REFERENCE", "STRATEGIES", "find_strategy"]

# What all others are compared with; it always runs.
REFERENCE = one.STRATEGY
STRATEGIES: dict[str, Strategy] = {
    module.STRATEGY.name: module.STRATEGY
    for module in (hvdtrain, horovod, ddp, fsdp2, dp, accelerate, torch_postlocal)
}


def find_strategy(name: str) -> Strategy:
    """Return the strategy of this name, the reference included."""
    return REFERENCE if name == REFERENCE.name else STRATEGIES[name]
