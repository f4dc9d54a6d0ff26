"""Declaration of options: once, for the command line, files, docs/options.md and checks."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, Literal, Self, TypeVar, get_args, get_origin, get_type_hints

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


# Called with the label of the option and its value.
Check = Callable[[str, Any], None]


def at_least(least: int) -> Check:
    """Return a check for integers of at least `least`."""

    def check(label: str, value: int) -> None:
        if value < least:
            raise UsageError(f"{label} must be at least {least}, got {value}")

    return check


def one_of(choices: Sequence[str]) -> Check:
    """Return a check for names from a list."""

    def check(label: str, value: str) -> None:
        if value not in choices:
            raise UsageError(f"{label} must be one of {', '.join(choices)}, got {value!r}")

    return check


def positive(label: str, value: float) -> None:
    """Require a finite number above 0."""
    if not (math.isfinite(value) and value > 0):
        raise UsageError(f"{label} must be a positive number, got {value}")


def not_negative(label: str, value: float) -> None:
    """Require a finite number of at least 0."""
    if not (math.isfinite(value) and value >= 0):
        raise UsageError(f"{label} must be 0 or more, got {value}")


def between_0_and_1(label: str, value: float) -> None:
    """Require a number from 0 to below 1."""
    if not 0 <= value < 1:
        raise UsageError(f"{label} must be 0 or more and less than 1, got {value}")


def not_empty(label: str, value: str) -> None:
    """Require text that is not empty."""
    if not value.strip():
        raise UsageError(f"{label} must not be empty, got {value!r}")


def every(label: str, value: str) -> None:
    """Require an interval; see Interval.parse."""
    Interval.parse(value, label)


T = TypeVar("T")

_METADATA = "hvdtrain"
# For each type its description for people, and the type that Python values must have.
_KINDS: Mapping[Any, tuple[str, type]] = {
    bool: ("true or false", bool),
    int: ("a whole number", numbers.Integral),
    float: ("a number", numbers.Real),
    str: ("text", str),
    Path: ("a path", Path),
    Mapping: ("names with values", Mapping),
}


@dataclass(frozen=True)
class Declaration:
    """What an option declares besides its name, its type and its default."""

    text: str
    metavar: str
    choices: tuple[str, ...]
    unset: str
    check: Check | None


@dataclass(frozen=True)
class Option:
    """One option of `train`."""

    name: str
    kind: Any
    may_be_unset: bool
    default: Any
    group: str
    declaration: Declaration

    @property
    def key(self) -> str:
        """The name in files, and after `--`."""
        return self.name.replace("_", "-")

    @property
    def label(self) -> str:
        """The name in error messages."""
        return self.key if self.name == "recipe" else f"--{self.key}"

    @property
    def expected(self) -> str:
        """A description of the type."""
        return _KINDS[self.kind][0]

    @property
    def default_text(self) -> str:
        """The default for people; empty if it is obvious."""
        if self.default is None or self.declaration.unset:
            return self.declaration.unset
        if self.kind in (bool, Mapping):
            return ""
        return f"{self.default:g}" if self.kind is float else str(self.default)

    def require(self, value: Any, label: str = "") -> None:
        """Check a value by itself."""
        label = label or self.label
        if value is None and self.may_be_unset:
            return
        expected, accepted = _KINDS[self.kind]
        # In Python True is an int.
        if not isinstance(value, accepted) or (isinstance(value, bool) and accepted is not bool):
            raise UsageError(f"{label} must be {expected}, got {value!r}")
        if self.declaration.check is not None:
            self.declaration.check(label, value)


def as_given(name: str, value: object) -> str:
    """Return an option and its value as they are given on the command line."""
    flag = f"--{name.replace('_', '-')}"
    return flag if value is True else f"{flag} {value}"


class OptionGroup:
    """Options of one topic: the base of frozen dataclasses whose fields are made by option()."""

    title: ClassVar[str]

    def check(self) -> None:
        """Check that the options of this group go together."""


def option(
    default: T,
    text: str,
    *,
    metavar: str = "",
    choices: Sequence[str] = (),
    unset: str = "",
    check: Check | None = None,
) -> T:
    """Return a field of an OptionGroup; see Declaration."""
    if choices:
        metavar, check = f"[{'|'.join(choices)}]", check or one_of(choices)
    metadata = {_METADATA: Declaration(text, metavar, tuple(choices), unset, check)}
    if isinstance(default, Mapping):
        made: T = field(default_factory=dict, metadata=metadata)  # type: ignore[assignment]
        return made
    return field(default=default, metadata=metadata)


def groups_of(kind: type) -> tuple[type[OptionGroup], ...]:
    """Return the groups that a dataclass inherits.

    Its last base is the first group, because a dataclass collects fields in that order.
    """
    return tuple(base for base in reversed(kind.__bases__) if issubclass(base, OptionGroup))


def declared(kind: type) -> tuple[Option, ...]:
    """Return the options of a dataclass that inherits groups, group by group."""
    hints = get_type_hints(kind)
    return tuple(
        Option(
            one.name,
            _kind(hints[one.name]),
            NoneType in get_args(hints[one.name]),
            {} if one.default is MISSING else one.default,
            group.title,
            one.metadata[_METADATA],
        )
        for group in groups_of(kind)
        for one in fields(group)  # type: ignore[arg-type]
    )


def _kind(hint: Any) -> Any:
    """Return T of `T | None`, and Mapping of Mapping[K, V]."""
    parts = get_args(hint)
    if NoneType in parts:
        (hint,) = (part for part in parts if part is not NoneType)
    return get_origin(hint) or hint
