"""The options of an optimizer, the same for every framework."""

from __future__ import annotations

from typing import Protocol

__all__ = ["OPTIMIZERS", "OptimizerOptions", "weight_decay_of"]

OPTIMIZERS = ("sgd", "adam", "adamw", "lars", "lamb")


class OptimizerOptions(Protocol):
    """The options that an optimizer is made from."""

    @property
    def optimizer(self) -> str:
        """One of OPTIMIZERS."""

    @property
    def momentum(self) -> float:
        """The momentum of sgd and lars."""

    @property
    def weight_decay(self) -> float | None:
        """The weight decay; None: the optimizer's default."""

    @property
    def clip_norm(self) -> float | None:
        """The maximum norm of a reduced gradient; None: no clipping."""


def weight_decay_of(options: OptimizerOptions) -> float:
    """Return the weight decay of the options; by default 0.01 for adamw, else 0."""
    if options.weight_decay is not None:
        return options.weight_decay
    return 0.01 if options.optimizer == "adamw" else 0.0
