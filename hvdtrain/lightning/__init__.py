"""Lightning's Trainer on hvdtrain's ranks: `Trainer(strategy="hvdtrain")`."""

from __future__ import annotations

from hvdtrain.lightning.environment import PYTORCH, gather_states
from hvdtrain.lightning.strategy import HvdStrategy

__all__ = ["HvdStrategy", "gather_states"]

_registry = PYTORCH.strategies.StrategyRegistry
if "hvdtrain" not in _registry:
    _registry.register("hvdtrain", HvdStrategy, description="Ranks of hvdtrain, under mpirun")
