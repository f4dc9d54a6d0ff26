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


@dataclass(frozen=True)
class Rule:
    """One mistake that the lint knows."""

    code: str
    title: str
    reason: str
    mend: str
    find: Callable[[Script], Iterator[Found]]
