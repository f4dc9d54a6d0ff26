"""What a rule is, and what it finds. The texts of all rules are in rules.md."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import TypeAlias


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
    code: str
    title: str
    reason: str
    mend: str

    def finding(self, path: object, line: int, what: str) -> Finding:
        """Return what is to be reported of a place that breaks the rule."""
        return Finding(str(path), line, self.code, f"{what}: {self.reason}", self.mend)


# The places that break a rule, and what is wrong there.
Places: TypeAlias = Iterator[tuple[ast.expr | ast.stmt, str]]

TABLE = files(__package__).joinpath("rules.md").read_text("utf-8")
_ROWS = (line.strip("| ").split(" | ") for line in TABLE.splitlines())
# By their codes, in which those of `lint --run` begin with a 9.
RULES = {row[0]: Rule(*row) for row in _ROWS if row[0].startswith("HVD")}
