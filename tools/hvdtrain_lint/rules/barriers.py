"""Barriers with nothing between them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise

from hvdtrain_lint.rules.rule import Found, Rule
from hvdtrain_lint.source.script import Script
from hvdtrain_lint.source.tree import blocks, path_of

_BARRIERS = {"barrier", "wait_for_everyone", "monitored_barrier"}


def _around_nothing(script: Script) -> Iterator[Found]:
    for holder in script.tree.nodes:
        for block in blocks(holder):
            for first, second in pairwise(block):
                call = _barrier(script, first)
                if call is not None and (again := _barrier(script, second)) is not None:
                    yield Found(again, f"{path_of(again.func)}() follows another one at once")


def _barrier(script: Script, statement: ast.stmt) -> ast.Call | None:
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or call.args or call.keywords:
        return None
    return call if script.names.last(call) in _BARRIERS else None


RULES = (
    Rule(
        "HVD601",
        "barriers around nothing",
        "no rank does anything between them",
        "leave one of them out",
        _around_nothing,
    ),
)
