"""How often something happens in a run: every so many steps, epochs or seconds."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, Self

from hvdtrain.errors import UsageError

__all__ = ["Interval", "Unit"]

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
        amount: how many of the unit, more than 0; steps and epochs are whole.
        unit: "steps" (of the optimizer), "epochs" or "seconds".
    """

    amount: float
    unit: Unit

    @classmethod
    def parse(cls, text: str, option: str = "an interval") -> Self:
        """Return the interval that a text like "5 steps" or "1.5 hours" names.

        Args:
            text: a number, then step, epoch, second, minute or hour, or the plural of it.
            option: what it was given for, as the message names it ("--checkpoint-every").

        Raises:
            UsageError: it names none.
        """
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
        """Return whether it is time, `step` steps after the very first start."""
        return self.unit == "steps" and step % int(self.amount) == 0

    def after_epoch(self, epoch: int) -> bool:
        """Return whether it is time, `epoch` whole epochs after the very first start."""
        return self.unit == "epochs" and epoch % int(self.amount) == 0

    @property
    def seconds(self) -> float | None:
        """The time between two, where the interval is one of time."""
        return self.amount if self.unit == "seconds" else None


def _refusal(option: str, text: str) -> UsageError:
    return UsageError(
        f"{option} must be a positive number and a unit, such as '5 steps', '1 epoch', "
        f"'30 seconds', '10 minutes' or '2 hours' (whole steps and epochs), got {text!r}"
    )
