"""What options say about an optimizer, for every framework alike."""

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
        """Of sgd and lars."""

    @property
    def weight_decay(self) -> float | None:
        """None: that of the optimizer."""

    @property
    def clip_norm(self) -> float | None:
        """The largest norm of a reduced gradient; None: any."""


def weight_decay_of(options: OptimizerOptions) -> float:
    """Return the weight decay that was asked for; without one 0.01 for adamw, else 0."""
    if options.weight_decay is not None:
        return options.weight_decay
    return 0.01 if options.optimizer == "adamw" else 0.0
