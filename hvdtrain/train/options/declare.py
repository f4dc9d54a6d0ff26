"""How an option is declared: once, for the command line, files, docs/options.md and checks."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

from hvdtrain.errors import UsageError
from hvdtrain.train.options.checks import Check, one_of

__all__ = ["Declaration", "Option", "OptionGroup", "declared", "groups_of", "option"]

T = TypeVar("T")

_METADATA = "hvdtrain"
# What a person is told to give, and what Python takes for it.
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
    """What is said of an option beside its name, its type and its default.

    Attributes:
        text: what it is for, in one sentence, without the default.
        metavar: stands for the value; empty: its type.
        choices: the values there are; empty: any.
        unset: what happens by default, where the default does not say it.
        check: raises UsageError where a value makes no sense by itself.
    """

    text: str
    metavar: str
    choices: tuple[str, ...]
    unset: str
    check: Check | None


@dataclass(frozen=True)
class Option:
    """One option of `train`.

    Attributes:
        name: of the attribute of TrainOptions.
        kind: bool, int, float, str, Path, or Mapping for names with values.
        may_be_unset: None is a value.
        default: when nobody says anything.
        group: the topic.
        told: what else is declared.
    """

    name: str
    kind: Any
    may_be_unset: bool
    default: Any
    group: str
    told: Declaration

    @property
    def key(self) -> str:
        """How it is written in files, and after `--`."""
        return self.name.replace("_", "-")

    @property
    def label(self) -> str:
        """What errors call it."""
        return self.key if self.name == "recipe" else f"--{self.key}"

    @property
    def expected(self) -> str:
        """What kind of value it takes."""
        return _KINDS[self.kind][0]

    @property
    def default_text(self) -> str:
        """The default for people; empty where that goes without saying."""
        if self.default is None or self.told.unset:
            return self.told.unset
        if self.kind in (bool, Mapping):
            return ""
        return f"{self.default:g}" if self.kind is float else str(self.default)

    def require(self, value: Any, label: str = "") -> None:
        """Check a value by itself.

        Args:
            value: to be checked.
            label: what to call the option in the error; empty: as on the command line.

        Raises:
            UsageError: it is of another type, or makes no sense.
        """
        label = label or self.label
        if value is None and self.may_be_unset:
            return
        expected, accepted = _KINDS[self.kind]
        # To Python True is the number 1.
        if not isinstance(value, accepted) or (isinstance(value, bool) and accepted is not bool):
            raise UsageError(f"{label} must be {expected}, got {value!r}")
        if self.told.check is not None:
            self.told.check(label, value)


class OptionGroup:
    """Options of one topic: base of frozen dataclasses whose fields are made by option()."""

    title: ClassVar[str]

    def check(self) -> None:
        """Raise UsageError where values of this group do not go together."""


def option(
    default: T,
    text: str,
    *,
    metavar: str = "",
    choices: Sequence[str] = (),
    unset: str = "",
    check: Check | None = None,
) -> T:
    """Return the field of a Group; see Declaration. A mapping is empty by default."""
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
