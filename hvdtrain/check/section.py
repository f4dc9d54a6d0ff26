"""One part of what `hvdtrain check` reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Section", "guarded"]


@dataclass(frozen=True)
class Section:
    """What was found, for programs and for people.

    Attributes:
        name: of the section.
        facts: what JSON can hold.
        lines: the same for people.
        problems: what keeps hvdtrain from working and how to mend it, one line each.
    """

    name: str
    facts: dict[str, Any]
    lines: tuple[str, ...]
    problems: tuple[str, ...] = ()


def guarded(name: str, check: Callable[[], Section]) -> Section:
    """Run a check; whatever it raises becomes a problem, so that the others still report."""
    try:
        return check()
    except Exception as error:  # a broken installation can break anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return Section(
            name,
            {},
            ("unknown",),
            (f"{name}: looking at it failed ({reason}): report this as a bug of hvdtrain",),
        )
