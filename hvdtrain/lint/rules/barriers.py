"""Barriers with nothing between them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise

from hvdtrain.lint.rules.rule import Found, Rule
from hvdtrain.lint.source.script import Script
from hvdtrain.lint.source.tree import blocks, last_name, path_of

__all__ = ["RULES"]

_BARRIERS = {"barrier", "wait_for_everyone", "monitored_barrier"}


def _around_nothing(script: Script) -> Iterator[Found]:
    for holder in script.tree.nodes:
        for block in blocks(holder):
            for first, second in pairwise(block):
                call = _barrier(first)
                if call is not None and (again := _barrier(second)) is not None:
                    yield Found(again, f"{path_of(again.func)}() follows another one at once")


def _barrier(statement: ast.stmt) -> ast.Call | None:
    value = statement.value if isinstance(statement, ast.Expr) else None
    is_barrier = isinstance(value, ast.Call) and last_name(value) in _BARRIERS
    return value if is_barrier and not value.args and not value.keywords else None  # type: ignore[union-attr,return-value]


RULES = (
    Rule(
        "HVD601",
        "barriers around nothing",
        "no rank does anything between them",
        "leave one of them out",
        _around_nothing,
    ),
)
