"""Results of operations that are thrown away, or divided once too often."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from hvdtrain_lint.rules.rule import Found, Rule
from hvdtrain_lint.source.data import evaluates, is_every_nth
from hvdtrain_lint.source.names import HVD
from hvdtrain_lint.source.script import Script, keyword
from hvdtrain_lint.source.tree import last_name, path_of

_NOT_IN_PLACE = {f"{HVD}.allreduce", f"{HVD}.broadcast", f"{HVD}.allgather"}
_VALUES = ("item", "numpy", "cpu", "detach")


def _divided_twice(script: Script) -> Iterator[Found]:
    for node in script.tree.nodes:
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div):
            continue
        if script.ranks.is_size(node.right) and _is_average(script, node.left):
            yield Found(node, "allreduce() has averaged already, and is divided by size() again")


def _is_average(script: Script, node: ast.expr) -> bool:
    if isinstance(node, ast.Call) and script.names.full(node) != f"{HVD}.allreduce":
        if last_name(node) in _VALUES and isinstance(node.func, ast.Attribute):
            return _is_average(script, node.func.value)
        return last_name(node) == "float" and bool(node.args) and _is_average(script, node.args[0])
    origins = [each for each in script.values.origins(node) if each is not node]
    if not origins:
        return _averages(script, node)
    return all(_is_average(script, each) for each in origins)


def _averages(script: Script, node: ast.expr) -> bool:
    if not isinstance(node, ast.Call) or script.names.full(node) != f"{HVD}.allreduce":
        return False
    op = keyword(node, "op")
    scaled = any(each.arg not in ("name", "op", "tensor") for each in node.keywords)
    return len(node.args) <= 1 and not scaled and (op is None or last_name(op) == "Average")


def _unequal_shares(script: Script) -> Iterator[Found]:
    for call in script.tree.calls:
        if not _averages(script, call):
            continue
        tensor = keyword(call, "tensor", 0)
        for each in script.values.origins(tensor) if tensor is not None else []:
            if any(_is_share(script, divisor) for divisor in _divisors(each)):
                yield Found(call, "each rank divides by the length of its own share")
                break


def _divisors(node: ast.expr) -> Iterator[ast.expr]:
    """Yield x for each division by len(x) in an expression."""
    for each in ast.walk(node):
        if isinstance(each, ast.BinOp) and isinstance(each.op, ast.Div):
            right = each.right
            if isinstance(right, ast.Call) and last_name(right) == "len" and right.args:
                yield right.args[0]


def _is_share(script: Script, node: ast.expr) -> bool:
    return any(is_every_nth(script, each) for each in script.values.origins(node))


def _counted_by_all(script: Script) -> Iterator[Found]:
    if script.uses_accelerate or script.has_trainer:
        return
    for node in script.tree.nodes:
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div):
            continue
        if not _is_whole_set(script, node.right):
            continue
        scope = script.tree.scope(node)
        paths = {path_of(each) for each in ast.walk(node.left)} - {None}
        summed = [
            c for c in script.tree.calls if script.tree.scope(c) is scope and _sums(script, c)
        ]
        if any(path_of(call.args[0]) in paths for call in summed) and not _has_size(script, node):
            yield Found(
                node,
                "every rank evaluates all samples, and the sum over ranks is divided once",
            )


def _sums(script: Script, call: ast.Call) -> bool:
    if script.names.full(call) != "torch.distributed.all_reduce" or not call.args:
        return False
    op = keyword(call, "op", 1)
    return op is None or last_name(op) == "SUM"


def _is_whole_set(script: Script, node: ast.expr) -> bool:
    """Return whether this is len(loader.dataset) of a loader that every rank reads in full."""
    if not isinstance(node, ast.Call) or last_name(node) != "len" or not node.args:
        return False
    data = node.args[0]
    if not isinstance(data, ast.Attribute) or data.attr != "dataset":
        return False
    loaders = script.values.origins(data.value)
    return bool(loaders) and all(_reads_all(script, loader) for loader in loaders)


def _reads_all(script: Script, loader: ast.expr) -> bool:
    if not isinstance(loader, ast.Call) or script.names.last(loader) != "DataLoader":
        return False
    if {each.arg for each in loader.keywords} & {"sampler", "batch_sampler", None}:
        return False
    data = keyword(loader, "dataset", 0)
    return data is not None and len(loader.args) <= 2 and evaluates(script, loader, data)


def _has_size(script: Script, node: ast.BinOp) -> bool:
    statement = script.tree.statement(node)
    return statement is None or any(
        isinstance(each, ast.expr) and script.ranks.is_size(each) for each in ast.walk(statement)
    )


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
        "the result is too small by that factor",
        "leave the division out, or use allreduce(..., op=Sum)",
        _divided_twice,
    ),
    Rule(
        "HVD208",
        "the result of an operation that is thrown away",
        "what follows uses the value of its own rank",
        "assign the result, or use the operation in place, such as allreduce_()",
        _thrown_away,
    ),
    Rule(
        "HVD209",
        "an average over ranks of averages over unequal shares",
        "that is not the average over samples, because shares differ by one sample",
        "add up sums and counts over the ranks (op=Sum), then divide",
        _unequal_shares,
    ),
    Rule(
        "HVD210",
        "a sum over ranks that have all evaluated all samples",
        "the result is size() times too large",
        "give each rank its own samples, or do not add up",
        _counted_by_all,
    ),
)
