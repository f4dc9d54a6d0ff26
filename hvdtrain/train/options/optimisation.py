"""Options of the optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.errors import UsageError
from hvdtrain.train.optimizers.choice import OPTIMIZERS
from hvdtrain.train.options.checks import between_0_and_1, not_negative, positive
from hvdtrain.train.options.declare import OptionGroup, option

__all__ = ["DEFAULT_LR", "SGD_MOMENTUM", "OptimisationOptions"]

# For one rank.
DEFAULT_LR = {"sgd": 0.02, "adam": 0.001, "adamw": 0.001, "lars": 1.0, "lamb": 0.002}
SGD_MOMENTUM = 0.9

_DEFAULT_LR_TEXT = ", ".join(f"{name} {value:g}" for name, value in DEFAULT_LR.items())
_WITH_MOMENTUM = ("sgd", "lars")


@dataclass(frozen=True, kw_only=True)
class OptimisationOptions(OptionGroup):
    """Options of the optimizer."""

    title = "Optimisation"

    optimizer: str = option("sgd", "What changes the weights.", choices=OPTIMIZERS)
    lr: float | None = option(
        None, "Learning rate for one rank.", unset=_DEFAULT_LR_TEXT, check=positive
    )
    momentum: float = option(SGD_MOMENTUM, "Of sgd and lars.", check=between_0_and_1)
    weight_decay: float | None = option(
        None,
        "Weight decay.",
        unset="adamw 0.01, else 0",
        check=not_negative,
    )
    clip_norm: float | None = option(
        None, "Most that the norm of the reduced gradient may be; more is scaled.", check=positive
    )
    ema: float | None = option(
        None,
        "Evaluate and keep the moving average of the weights, with this decay, as 0.999.",
        check=between_0_and_1,
    )

    def check(self) -> None:
        """Check that the options of this group go together.

        Raises:
            UsageError: they do not.
        """
        if self.momentum != SGD_MOMENTUM and self.optimizer not in _WITH_MOMENTUM:
            raise UsageError(
                f"--momentum goes with --optimizer {' or '.join(_WITH_MOMENTUM)} only, got "
                f"--optimizer {self.optimizer}"
            )

    @property
    def base_lr(self) -> float:
        """The learning rate for one rank."""
        return DEFAULT_LR[self.optimizer] if self.lr is None else self.lr
