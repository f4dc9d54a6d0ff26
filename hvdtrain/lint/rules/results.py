"""Results of operations that are thrown away, or divided once too often."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from hvdtrain.lint.rules.rule import Found, Rule
from hvdtrain.lint.source.names import HVD
from hvdtrain.lint.source.script import Script, keyword
from hvdtrain.lint.source.tree import last_name, path_of

__all__ = ["RULES"]

_NOT_IN_PLACE = {f"{HVD}.allreduce", f"{HVD}.broadcast", f"{HVD}.allgather"}
_VALUES = ("item", "numpy", "cpu", "detach")


def _divided_twice(script: Script) -> Iterator[Found]:
    for node in script.tree.nodes:
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div):
            continue
        if script.ranks.is_size(node.right) and _is_average(script, node.left):
            yield Found(node, "allreduce() has averaged already, and is divided by size() again")


def _is_average(script: Script, node: ast.expr) -> bool:
    while isinstance(node, ast.Call) and script.names.full(node) != f"{HVD}.allreduce":
        if last_name(node) in _VALUES and isinstance(node.func, ast.Attribute):
            node = node.func.value
        elif last_name(node) == "float" and node.args:
            node = node.args[0]
        else:
            return False
    origins = script.values.origins(node)
    return bool(origins) and all(_averages(script, each) for each in origins)


def _averages(script: Script, node: ast.expr) -> bool:
    if not isinstance(node, ast.Call) or script.names.full(node) != f"{HVD}.allreduce":
        return False
    op = keyword(node, "op")
    scaled = any(each.arg not in ("name", "op", "tensor") for each in node.keywords)
    return len(node.args) <= 1 and not scaled and (op is None or last_name(op) == "Average")


def _thrown_away(script: Script) -> Iterator[Found]:
    for node in script.tree.nodes:
        call = node.value if isinstance(node, ast.Expr) else None
        if not isinstance(call, ast.Call) or script.names.full(call) not in _NOT_IN_PLACE:
            continue
        tensor = keyword(call, "tensor", 0)
        path = path_of(tensor) if tensor is not None else None
        if path and _is_used_after(script, path, call):
            name = last_name(call)
            yield Found(call, f"{name}() returns its result and leaves {path} as it was")


def _is_used_after(script: Script, path: str, call: ast.Call) -> bool:
    scope = script.tree.scope(call)
    return any(
        path_of(each) == path and each.lineno > (call.end_lineno or call.lineno)
        for each in script.tree.own(scope)
        if isinstance(each, (ast.Name, ast.Attribute))
    )


RULES = (
    Rule(
        "HVD204",
        "an average that is divided by the number of ranks again",
        "so the result is too small by that factor",
        "leave the division out, or use allreduce(..., op=Sum)",
        _divided_twice,
    ),
    Rule(
        "HVD208",
        "the result of an operation that is thrown away",
        "so what follows uses the value of its own rank",
        "assign the result, or use the operation in place, such as allreduce_()",
        _thrown_away,
    ),
)
