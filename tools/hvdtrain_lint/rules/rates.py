"""Learning rates and batch sizes that do not go together."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from hvdtrain_lint.rules.rule import Found, Rule
from hvdtrain_lint.source.data import train_batch_sizes
from hvdtrain_lint.source.script import Script, keyword
from hvdtrain_lint.source.tree import last_name

_OPTIMIZERS = {
    *("SGD", "Adam", "AdamW", "RMSprop", "Adadelta", "Adagrad", "Adamax", "Nadam", "NAdam"),
    *("RAdam", "Lion", "LBFGS", "Ftrl", "Rprop", "Adafactor", "LAMB", "LARS"),
}
_TF1_OPTIMIZER = re.compile(r"^(?!Distributed)\w+Optimizer$")
_TOTAL = re.compile(r"(global|total)_?(train_?)?batch", re.IGNORECASE)
_TOTAL_HELP = re.compile(
    r"\b(total|global|overall)\b.{0,24}\bbatch|batch.{0,24}\b(over|across|of|on|for) all\b"
    r"|\b(over|across) all (ranks|gpus|workers|processes|devices)",
    re.IGNORECASE,
)
_EACH_HELP = re.compile(r"\b(per|each|every|single)\b", re.IGNORECASE)
# A rate that passes through these stays a rate.
_PASSING = {"int", "float", "round", "max", "abs"}
_DEEPEST = 8


def rates(script: Script) -> Iterator[tuple[ast.Call, ast.expr]]:
    for call in script.tree.calls:
        last = script.names.last(call)
        if last not in _OPTIMIZERS and not _TF1_OPTIMIZER.match(last):
            continue
        of_torch = (script.names.full(call) or "").startswith("torch")
        rate = keyword(call, "lr") or keyword(call, "learning_rate", 1 if of_torch else 0)
        if rate is not None:
            yield call, rate


def _scaled_without_need(script: Script) -> Iterator[Found]:
    sizes = [_size_factors(script, size) for size in train_batch_sizes(script)]
    if not sizes or any(size != -1 for size in sizes):
        return
    for call, rate in rates(script):
        if (_size_factors(script, rate) or 0) > 0:
            yield Found(
                call,
                "the rate is multiplied by the number of ranks, while the batch is divided by it",
            )


def _scaled_twice(script: Script) -> Iterator[Found]:
    for call, rate in rates(script):
        if (_size_factors(script, rate) or 0) > 1:
            yield Found(call, "the rate is multiplied by the number of ranks twice")


def _warm_up(script: Script) -> Iterator[Found]:
    for call in script.named("LearningRateWarmupCallback"):
        rate = keyword(call, "initial_lr")
        if rate is None or "scale" in last_name(rate).lower() or _size_factors(script, rate) != 0:
            continue
        yield Found(call, "the warm-up begins at initial_lr / size() and ends at initial_lr")


def _total_for_each(script: Script) -> Iterator[Found]:
    if not (script.uses_hvd or script.named("DistributedDataParallel")):
        return
    if script.uses_accelerate or script.has_trainer or "distribute" in script.words:
        return
    told = set(_arguments_for_all(script))
    for size in train_batch_sizes(script):
        names = [last_name(each) for each in (size, *script.values.origins(size))]
        name = next((each for each in names if _TOTAL.search(each) or each in told), "")
        if isinstance(size, ast.Call) or not name:
            continue
        if not _is_divided(script, name) and _size_factors(script, size) in (0, 1):
            yield Found(size, f"each rank gets {name}, the batch that all ranks have together")


def _arguments_for_all(script: Script) -> Iterator[str]:
    for call in script.named("add_argument"):
        told = keyword(call, "help")
        flags = [a.value for a in call.args if isinstance(a, ast.Constant)]
        text = str(told.value) if isinstance(told, ast.Constant) else ""
        if _TOTAL_HELP.search(text) and not _EACH_HELP.search(text):
            for flag in flags:
                if str(flag).startswith("--") and "batch" in str(flag) + text:
                    yield str(flag)[2:].replace("-", "_")


def _is_divided(script: Script, name: str) -> bool:
    return any(
        isinstance(node, (ast.BinOp, ast.AugAssign))
        and isinstance(node.op, (ast.Div, ast.FloorDiv))
        and last_name(node.left if isinstance(node, ast.BinOp) else node.target) == name
        for node in script.tree.nodes
    )


def _size_factors(script: Script, node: ast.expr, depth: int = 0) -> int | None:
    """Return how often a product has the number of ranks as a factor; -1 if it is divided by it.

    None where names have several values, or lead to none that is a number or an argument.
    """
    if depth > _DEEPEST:
        return None
    if script.ranks.is_size(node):
        return 1
    if isinstance(node, ast.BinOp):
        left = _size_factors(script, node.left, depth + 1)
        right = _size_factors(script, node.right, depth + 1)
        if left is None or right is None:
            return None
        if isinstance(node.op, ast.Mult):
            return left + right
        if isinstance(node.op, (ast.Div, ast.FloorDiv)):
            return left - right
        return 0 if left == right == 0 else None
    if isinstance(node, ast.Call):
        passes = last_name(node) in _PASSING and node.args
        return _size_factors(script, node.args[0], depth + 1) if passes else None
    if isinstance(node, (ast.Name, ast.Attribute)):
        return _of_name(script, node, depth + 1)
    return 0 if isinstance(node, (ast.Constant, ast.UnaryOp, ast.Subscript)) else None


def _of_name(script: Script, node: ast.expr, depth: int) -> int | None:
    """Return the factors of what a name is assigned once, and of what it is multiplied by later."""
    found, firsts = 0, 0
    for value in script.values.of(node):
        factors = _size_factors(script, value, depth)
        if factors is None:
            return None
        later = script.tree.parent(value)
        if not isinstance(later, ast.AugAssign):
            firsts += 1
        elif isinstance(later.op, (ast.Div, ast.FloorDiv)):
            factors = -factors
        elif not isinstance(later.op, ast.Mult):
            return None
        found += factors
    return found if firsts <= 1 else None


RULES = (
    Rule(
        "HVD301",
        "a scaled learning rate with a batch that does not grow",
        "all ranks together have the batch of one rank, for which the rate is too high",
        "scale the rate by size(), or divide the batch by it, not both",
        _scaled_without_need,
    ),
    Rule(
        "HVD302",
        "a learning rate that is scaled twice",
        "it grows with the square of the number of ranks",
        "multiply it by size() in one place",
        _scaled_twice,
    ),
    Rule(
        "HVD303",
        "a warm-up to a learning rate that is not scaled",
        "training ends up with the rate of one rank",
        "give the scaled rate: initial_lr=rate * hvd.size()",
        _warm_up,
    ),
    Rule(
        "HVD304",
        "the batch of all ranks given to each rank",
        "it is size() times as large as its name, or its help, says",
        "divide it by the number of ranks",
        _total_for_each,
    ),
)
