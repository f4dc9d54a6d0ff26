"""Intervals of a run: a number of steps, epochs or seconds."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, Self

from hvdtrain.errors import UsageError

Unit = Literal["steps", "epochs", "seconds"]

_UNITS: dict[str, tuple[Unit, int]] = {
    "step": ("steps", 1),
    "epoch": ("epochs", 1),
    "second": ("seconds", 1),
    "minute": ("seconds", 60),
    "hour": ("seconds", 3600),
}
_TEXT = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)")


@dataclass(frozen=True)
class Interval:
    """An interval of a run.

    Attributes:
        unit: "steps" (of the optimizer), "epochs" or "seconds".
    """

    amount: float
    unit: Unit

    @classmethod
    def parse(cls, text: str, option: str = "an interval") -> Self:
        """Return the interval that a text such as "5 steps" or "1.5 hours" names."""
        match = _TEXT.fullmatch(text.strip().lower())
        word = match[2].removesuffix("s") if match else ""
        if match is None or word not in _UNITS:
            raise _refusal(option, text)
        unit, factor = _UNITS[word]
        amount = float(match[1]) * factor
        if not (math.isfinite(amount) and amount > 0):
            raise _refusal(option, text)
        if unit != "seconds" and not amount.is_integer():
            raise _refusal(option, text)
        return cls(amount, unit)

    def after_step(self, step: int) -> bool:
        """Return whether the interval ends `step` steps after the very first start."""
        return self.unit == "steps" and step % int(self.amount) == 0

    def after_epoch(self, epoch: int) -> bool:
        """Return whether the interval ends `epoch` whole epochs after the very first start."""
        return self.unit == "epochs" and epoch % int(self.amount) == 0

    @property
    def seconds(self) -> float | None:
        """The length in seconds; None if the unit is steps or epochs."""
        return self.amount if self.unit == "seconds" else None


def _refusal(option: str, text: str) -> UsageError:
    return UsageError(
        f"{option} must be a positive number and a unit, such as '5 steps', '1 epoch', "
        f"'30 seconds', '10 minutes' or '2 hours' (whole steps and epochs), got {text!r}"
    )
