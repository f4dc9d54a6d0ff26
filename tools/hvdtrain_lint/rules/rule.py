"""What a rule is, and what it finds."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hvdtrain_lint.source.script import Script


@dataclass(frozen=True)
class Found:
    """A place that breaks a rule."""

    node: ast.AST
    what: str


_Find = Callable[[Script], Iterator[Found]]


@dataclass(frozen=True)
class Rule:
    """One mistake that the lint knows."""

    code: str
    title: str
    reason: str
    mend: str
    find: _Find


TABLE: list[Rule] = []


def rule(code: str, title: str, reason: str, mend: str) -> Callable[[_Find], _Find]:
    """Add the function that finds a mistake to the table."""

    def add(find: _Find) -> _Find:
        TABLE.append(Rule(code, title, reason, mend, find))
        return find

    return add
