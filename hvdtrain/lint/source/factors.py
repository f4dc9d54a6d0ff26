"""How often an expression is multiplied by the number of ranks."""

from __future__ import annotations

import ast

from hvdtrain.lint.source.script import Script
from hvdtrain.lint.source.tree import last_name

__all__ = ["size_factors"]

_PASSING = {"int", "float", "round", "max", "abs"}
_DEEPEST = 8


def size_factors(script: Script, node: ast.expr, depth: int = 0) -> int | None:
    """Return how often a product has the number of ranks as a factor; -1 if it is divided by it.

    None where names have several values, or lead to none that is a number or an argument.
    """
    if depth > _DEEPEST:
        return None
    if script.ranks.is_size(node):
        return 1
    if isinstance(node, ast.BinOp):
        left = size_factors(script, node.left, depth + 1)
        right = size_factors(script, node.right, depth + 1)
        if left is None or right is None:
            return None
        if isinstance(node.op, ast.Mult):
            return left + right
        if isinstance(node.op, (ast.Div, ast.FloorDiv)):
            return left - right
        return 0 if left == right == 0 else None
    if isinstance(node, ast.Call):
        passes = last_name(node) in _PASSING and node.args
        return size_factors(script, node.args[0], depth + 1) if passes else None
    if isinstance(node, (ast.Name, ast.Attribute)):
        values = script.values.of(node)
        if len(values) > 1:
            return None
        return size_factors(script, values[0], depth + 1) if values else 0
    return 0 if isinstance(node, (ast.Constant, ast.UnaryOp, ast.Subscript)) else None
