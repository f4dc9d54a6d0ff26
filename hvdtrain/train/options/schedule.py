"""Options of the learning rate schedule."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.errors import UsageError
from hvdtrain.train.optimizers.schedule import SCALINGS, SCHEDULES, parse_milestones
from hvdtrain.train.options.checks import not_negative, positive
from hvdtrain.train.options.declare import OptionGroup, option

# The schedules that each option applies to.
_GO_WITH = {
    "milestones": ("step",),
    "decay": ("step",),
    "power": ("polynomial",),
    "final_lr": ("cosine", "polynomial"),
}


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions(OptionGroup):
    """Options of the learning rate schedule."""

    title = "Learning rate over time"

    lr_scaling: str = option(
        "linear", "How the learning rate grows with the ranks.", choices=SCALINGS
    )
    warmup_epochs: float = option(
        5.0, "Epochs in which it rises from the rate for one rank.", check=not_negative
    )
    schedule: str = option("constant", "How it decays after the warm-up.", choices=SCHEDULES)
    milestones: str = option(
        "", "For step: the epochs after which it decays, such as 30,60,80.", metavar="E,F,..."
    )
    decay: float = option(0.1, "For step: its factor at each milestone.", check=positive)
    power: float = option(1.0, "For polynomial: the exponent; 1: a straight line.", check=positive)
    final_lr: float = option(
        0.0,
        "For cosine and polynomial: the final rate, not scaled by the ranks.",
        check=not_negative,
    )

    def check(self) -> None:
        """Check that the options of this group go together."""
        for name, schedules in _GO_WITH.items():
            if (
                getattr(self, name) != getattr(ScheduleOptions, name)
                and self.schedule not in schedules
            ):
                raise UsageError(
                    f"--{name.replace('_', '-')} goes with --schedule {' or '.join(schedules)} "
                    f"only, got --schedule {self.schedule}"
                )
        if self.schedule == "step" and not parse_milestones(self.milestones):
            raise UsageError("--schedule step needs --milestones, the epochs, such as 30,60,80")
