"""What a rule is, and what it finds."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from hvdtrain_lint.source.script import Script


@dataclass(frozen=True, order=True)
class Finding:
    """A mistake in a script: its place, what is wrong there, and how to fix it."""

    path: str
    line: int
    code: str
    reason: str
    mend: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.code} {self.reason}; {self.mend}"


@dataclass(frozen=True)
class Rule:
    """One mistake that the lint knows."""

    code: str
    title: str
    reason: str
    mend: str

    def finding(self, path: object, line: int, what: str) -> Finding:
        """Return what is to be reported of a place that breaks the rule."""
        return Finding(str(path), line, self.code, f"{what}: {self.reason}", self.mend)


# The places that break a rule, and what is wrong there.
Places: TypeAlias = Iterator[tuple[ast.expr | ast.stmt, str]]
_Find: TypeAlias = Callable[[Script], Places]

FINDERS: dict[Rule, _Find] = {}


def rule(title: str, reason: str, mend: str) -> Callable[[_Find], _Find]:
    """Add the function that finds a mistake, and has its code as a name, to the rules."""

    def add(find: _Find) -> _Find:
        FINDERS[Rule(find.__name__.upper(), title, reason, mend)] = find
        return find

    return add
