"""One section of the report of `hvdtrain check`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Section:
    """The findings of a check, as data and as text."""

    name: str
    facts: Mapping[str, object]
    lines: tuple[str, ...]
    problems: tuple[str, ...] = ()


def guarded(name: str, check: Callable[[], Section]) -> Section:
    """Run a check, and turn what it raises into a problem, so that the others still report."""
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
