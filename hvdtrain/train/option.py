"""Declaration of options: once, for the command line, files, docs/options.md and checks."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal, Self, TypeVar, get_args, get_origin, get_type_hints

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
    """An interval of a run, in steps of the optimizer, epochs or seconds."""

    amount: float
    unit: Unit

    @classmethod
    def parse(cls, text: str, option: str = "an interval") -> Self:
        """Return the interval that a text such as "5 steps" or "1.5 hours" names."""
        match = _TEXT.fullmatch(text.strip().lower())
        number, word = (match[1], match[2].removesuffix("s")) if match else ("0", "")
        unit, factor = _UNITS.get(word, (None, 0))
        amount = float(number) * factor
        is_whole = unit == "seconds" or amount.is_integer()
        if unit is None or not (0 < amount < math.inf and is_whole):
            raise UsageError(
                f"{option} must be a positive number and a unit, such as '5 steps', '1 epoch', "
                f"'30 seconds', '10 minutes' or '2 hours' (whole steps and epochs), got {text!r}"
            )
        return cls(amount, unit)

    def ends_with_step(self, step: int) -> bool:
        """Return whether the interval ends `step` steps after the very first start."""
        return self.unit == "steps" and step % int(self.amount) == 0

    def ends_with_epoch(self, epoch: int) -> bool:
        """Return whether the interval ends `epoch` whole epochs after the very first start."""
        return self.unit == "epochs" and epoch % int(self.amount) == 0

    @property
    def seconds(self) -> float | None:
        """The length in seconds; None if the unit is steps or epochs."""
        return self.amount if self.unit == "seconds" else None


# Called with the label of the option and its value; raises UsageError.
Check = Callable[[str, Any], object]


def requires(holds: Callable[[Any], bool], words: str) -> Check:
    """Return a check for values of which something holds, in the words of its error."""

    def check(label: str, value: Any) -> None:
        if not holds(value):
            raise UsageError(f"{label} must {words}, got {value!r}")

    return check


def at_least(least: int) -> Check:
    return requires(lambda value: value >= least, f"be at least {least}")


def one_of(choices: Sequence[str]) -> Check:
    return requires(lambda value: value in choices, f"be one of {', '.join(choices)}")


positive = requires(lambda value: 0 < value < math.inf, "be a positive number")
not_negative = requires(lambda value: 0 <= value < math.inf, "be 0 or more")
between_0_and_1 = requires(lambda value: 0 <= value < 1, "be 0 or more and less than 1")
not_empty = requires(lambda value: bool(value.strip()), "not be empty")


def every(label: str, value: str) -> None:
    Interval.parse(value, label)


# Some parsers read numbers with leading zeros as octal, others as decimal.
_INTEGER = re.compile(r"[+-]?(0|[1-9](_?[0-9])*)")
_FLOAT = re.compile(
    r"[+-]?(((0|[1-9](_?[0-9])*)(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?|\.?inf|\.?nan)", re.IGNORECASE
)
_BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def _integer(text: str) -> int:
    if not _INTEGER.fullmatch(text):
        raise ValueError(text)
    return int(text)


def _float(text: str) -> float:
    if not _FLOAT.fullmatch(text):
        raise ValueError(text)
    return float(re.sub(r"\.(?=inf|nan)", "", text, flags=re.IGNORECASE))


def _bool(text: str) -> bool:
    if text.lower() not in _BOOLS:
        raise ValueError(text)
    return _BOOLS[text.lower()]


@dataclass(frozen=True)
class ValueKind:
    """A type of values, of options and of arguments of recipes."""

    words: str  # for people
    read: Callable[[str], Any]  # returns the value that a text represents, or raises ValueError
    accepted: type  # of Python values


KINDS: Mapping[Any, ValueKind] = {
    bool: ValueKind("true or false", _bool, bool),
    int: ValueKind("a whole number", _integer, numbers.Integral),
    float: ValueKind("a number", _float, numbers.Real),
    str: ValueKind("text", str, str),
    Path: ValueKind("a path", Path, Path),
}

T = TypeVar("T")


@dataclass(frozen=True)
class Option:
    """One option of `train`; see option()."""

    name: str
    kind: Any
    may_be_unset: bool
    default: Any
    group: str
    text: str
    metavar: str
    choices: tuple[str, ...]
    unset: str
    check: Check | None

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
        return "names with values" if self.kind is Mapping else KINDS[self.kind].words

    @property
    def default_text(self) -> str:
        """The default for people; empty if it is obvious."""
        if self.default is None or self.unset:
            return self.unset
        if self.kind in (bool, Mapping):
            return ""
        return f"{self.default:g}" if self.kind is float else str(self.default)

    def require(self, value: Any, label: str = "") -> None:
        label = label or self.label
        if value is None and self.may_be_unset:
            return
        accepted = Mapping if self.kind is Mapping else KINDS[self.kind].accepted
        # In Python True is an int.
        if not isinstance(value, accepted) or (isinstance(value, bool) and accepted is not bool):
            raise UsageError(f"{label} must be {self.expected}, got {value!r}")
        if self.check is not None:
            self.check(label, value)

    def given(self, value: object) -> str:
        """Return the option with a value as on the command line."""
        return self.label if value is True else f"{self.label} {value}"


def option(
    default: T,
    text: str,
    *,
    group: str = "",
    metavar: str = "",
    choices: Sequence[str] = (),
    unset: str = "",
    check: Check | None = None,
) -> T:
    """Return the field of an option.

    `group` is the title of the topic that begins with it; `unset` is what applies where it is None.
    """
    if choices:
        metavar, check = f"[{'|'.join(choices)}]", check or one_of(choices)
    about = {"text": text, "metavar": metavar, "choices": tuple(choices), "unset": unset}
    metadata = {**about, "group": group, "check": check}
    if isinstance(default, Mapping):
        made: T = field(default_factory=dict, metadata=metadata)  # type: ignore[assignment]
        return made
    return field(default=default, metadata=metadata)


def declared(kind: type) -> tuple[Option, ...]:
    """Return the options of a dataclass whose fields are made by option()."""
    hints, group, found = get_type_hints(kind), "", []
    for one in fields(kind):
        hint, group = hints[one.name], one.metadata["group"] or group
        unset = NoneType in get_args(hint)
        if unset:
            (hint,) = (part for part in get_args(hint) if part is not NoneType)
        default = {} if one.default is MISSING else one.default
        about = {**one.metadata, "group": group}
        found.append(Option(one.name, get_origin(hint) or hint, unset, default, **about))
    return tuple(found)
