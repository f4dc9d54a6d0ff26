"""What is known of the samplers and loaders of a script."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from hvdtrain.lint.source.script import Script, keyword
from hvdtrain.lint.source.tree import last_name

__all__ = ["evaluates", "is_every_nth", "is_false", "is_true", "rank_samplers", "train_batch_sizes"]

_EVALUATION = re.compile(
    r"(^|_)(test|tests|testing|val|valid|validation|eval|evaluation|dev)(_|$|set|data|ds|loader)"
    r"|(testset|valset|testloader|valloader|testdata|testsampler)",
    re.IGNORECASE,
)


def evaluates(script: Script, node: ast.expr) -> bool:
    """Return whether an expression is surely, by its names and arguments, data for evaluation."""
    if _is_for_evaluation(node):
        return True
    return all(_is_for_evaluation(each) for each in script.values.origins(node))


def _is_for_evaluation(node: ast.expr) -> bool:
    if not isinstance(node, ast.Call):
        return bool(_EVALUATION.search(last_name(node)))
    return is_false(keyword(node, "train")) or _is_evaluation_split(keyword(node, "split"))


def rank_samplers(script: Script, *names: str) -> Iterator[tuple[ast.Call, bool]]:
    """Yield the calls that make samplers of these classes, and whether they are for evaluation."""
    for call in script.named(*names):
        data = keyword(call, "dataset", 0)
        target = script.tree.parent(call)
        named = []
        if isinstance(target, ast.Assign):
            named = [last_name(each) for each in target.targets]
        elif isinstance(target, ast.AnnAssign):
            named = [last_name(target.target)]
        of_name = any(_EVALUATION.search(name) for name in named)
        yield call, of_name or (data is not None and evaluates(script, data))


def train_batch_sizes(script: Script) -> Iterator[ast.expr]:
    """Yield the batch sizes of loaders and fits, without those for evaluation."""
    for call in script.tree.calls:
        last = script.names.last(call)
        if last == "DataLoader":
            data, size = keyword(call, "dataset", 0), keyword(call, "batch_size", 1)
        elif last == "fit" and isinstance(call.func, ast.Attribute):
            data, size = None, keyword(call, "batch_size", 2)
        elif last == "batch" and isinstance(call.func, ast.Attribute):
            data, size = call.func.value, keyword(call, "batch_size", 0)
        else:
            continue
        if size is not None and (data is None or not evaluates(script, data)):
            yield size


def is_every_nth(script: Script, node: ast.expr) -> bool:
    """Return whether an expression is x[rank :: size], of which ranks may get one more or less."""
    if not isinstance(node, ast.Subscript) or not isinstance(node.slice, ast.Slice):
        return False
    start, stop, step = node.slice.lower, node.slice.upper, node.slice.step
    if start is None or stop is not None or step is None:
        return False
    return script.ranks.is_rank(start) and script.ranks.is_size(step)


def is_true(node: ast.expr | None) -> bool:
    """Return whether an argument is the word True."""
    return isinstance(node, ast.Constant) and node.value is True


def is_false(node: ast.expr | None) -> bool:
    """Return whether an argument is the word False."""
    return isinstance(node, ast.Constant) and node.value is False


def _is_evaluation_split(node: ast.expr | None) -> bool:
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_text and bool(_EVALUATION.search(node.value))  # type: ignore[union-attr]
