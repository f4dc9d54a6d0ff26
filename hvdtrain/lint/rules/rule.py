"""What a rule is, and what it finds."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hvdtrain.lint.source.script import Script

__all__ = ["Found", "Rule"]


@dataclass(frozen=True)
class Found:
    """A place that breaks a rule.

    Attributes:
        node: where it is.
        what: what is there, which begins the reason: "torch.save() runs on all ranks".
    """

    node: ast.AST
    what: str


@dataclass(frozen=True)
class Rule:
    """One mistake that the lint knows.

    Attributes:
        code: its stable name.
        title: the mistake, in a few words.
        reason: what follows from it; a sentence of its own, after a colon.
        mend: what to do.
        find: yields the places in a script that break it.
    """

    code: str
    title: str
    reason: str
    mend: str
    find: Callable[[Script], Iterator[Found]]
