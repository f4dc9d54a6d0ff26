"""Options of the optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.errors import UsageError
from hvdtrain.train.optimizers.choice import OPTIMIZERS
from hvdtrain.train.options.checks import between_0_and_1, not_negative, positive
from hvdtrain.train.options.declare import OptionGroup, option

# For one rank.
DEFAULT_LR = {"sgd": 0.02, "adam": 0.001, "adamw": 0.001, "lars": 1.0, "lamb": 0.002}
SGD_MOMENTUM = 0.9

_DEFAULT_LR_TEXT = ", ".join(f"{name} {value:g}" for name, value in DEFAULT_LR.items())
_WITH_MOMENTUM = ("sgd", "lars")
_OF_LAYERS = ("lars", "lamb")


@dataclass(frozen=True, kw_only=True)
class OptimisationOptions(OptionGroup):
    """Options of the optimizer."""

    title = "Optimisation"

    optimizer: str = option("sgd", "Optimizer that updates the weights.", choices=OPTIMIZERS)
    lr: float | None = option(
        None, "Learning rate for one rank.", unset=_DEFAULT_LR_TEXT, check=positive
    )
    momentum: float = option(SGD_MOMENTUM, "Momentum of sgd and lars.", check=between_0_and_1)
    weight_decay: float | None = option(
        None,
        "Weight decay.",
        unset="adamw 0.01, else 0",
        check=not_negative,
    )
    clip_norm: float | None = option(
        None,
        "Maximum norm of the reduced gradient, to which larger ones are scaled.",
        check=positive,
    )
    ema: float | None = option(
        None,
        "Decay of a moving average of the weights, such as 0.999, which is evaluated and saved.",
        check=between_0_and_1,
    )

    shard_optimizer: bool | None = option(
        None,
        "Share the optimizer's work and state among the ranks of a node, see docs/sharded.md.",
        unset="where it changes no bit of the results",
    )

    def check(self) -> None:
        """Check that the options of this group go together."""
        if self.momentum != SGD_MOMENTUM and self.optimizer not in _WITH_MOMENTUM:
            raise UsageError(
                f"--momentum goes with --optimizer {' or '.join(_WITH_MOMENTUM)} only, got "
                f"--optimizer {self.optimizer}"
            )
        if self.shard_optimizer and self.optimizer in _OF_LAYERS:
            raise UsageError(
                f"--shard-optimizer does not go with --optimizer {self.optimizer}, which needs the "
                "norms of whole layers"
            )

    @property
    def base_lr(self) -> float:
        """The learning rate for one rank."""
        return DEFAULT_LR[self.optimizer] if self.lr is None else self.lr
