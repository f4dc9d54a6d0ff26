"""Learning rates and batch sizes that do not go together."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from hvdtrain.lint.rules.rule import Found, Rule
from hvdtrain.lint.source.data import train_batch_sizes
from hvdtrain.lint.source.factors import size_factors
from hvdtrain.lint.source.script import Script, keyword
from hvdtrain.lint.source.tree import last_name

__all__ = ["RULES"]

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


def _rates(script: Script) -> Iterator[tuple[ast.Call, ast.expr]]:
    for call in script.tree.calls:
        last = script.names.last(call)
        if last not in _OPTIMIZERS and not _TF1_OPTIMIZER.match(last):
            continue
        of_torch = (script.names.full(call) or "").startswith("torch")
        rate = keyword(call, "lr") or keyword(call, "learning_rate", 1 if of_torch else 0)
        if rate is not None:
            yield call, rate


def _scaled_without_need(script: Script) -> Iterator[Found]:
    sizes = [size_factors(script, size) for size in train_batch_sizes(script)]
    if not sizes or any(size != -1 for size in sizes):
        return
    for call, rate in _rates(script):
        if (size_factors(script, rate) or 0) > 0:
            yield Found(
                call,
                "the rate is multiplied by the number of ranks, while the batch is divided by it",
            )


def _scaled_twice(script: Script) -> Iterator[Found]:
    for call, rate in _rates(script):
        if (size_factors(script, rate) or 0) > 1:
            yield Found(call, "the rate is multiplied by the number of ranks twice")


def _warm_up(script: Script) -> Iterator[Found]:
    for call in script.named("LearningRateWarmupCallback"):
        rate = keyword(call, "initial_lr")
        if rate is None or "scale" in last_name(rate).lower() or size_factors(script, rate) != 0:
            continue
        yield Found(call, "the warm-up begins at initial_lr / size() and ends at initial_lr")


def _total_for_each(script: Script) -> Iterator[Found]:
    if not (script.uses_hvd or script.named("DistributedDataParallel")):
        return
    if script.uses_accelerate or script.has_trainer or "distribute" in script.words:
        return
    told = set(_arguments_for_all(script))
    for size in train_batch_sizes(script):
        name = last_name(size)
        if isinstance(size, ast.Call) or not (_TOTAL.search(name) or name in told):
            continue
        if not _is_divided(script, name) and size_factors(script, size) in (0, 1):
            yield Found(size, f"each rank gets {name}, the batch that all ranks have together")


def _arguments_for_all(script: Script) -> Iterator[str]:
    for call in script.named("add_argument"):
        told = keyword(call, "help")
        flags = [a.value for a in call.args if isinstance(a, ast.Constant)]
        text = str(told.value) if isinstance(told, ast.Constant) else ""
        if _TOTAL_HELP.search(text) and not _EACH_HELP.search(text):
            for flag in flags:
                if str(flag).startswith("--") and "batch" in str(flag):
                    yield str(flag)[2:].replace("-", "_")


def _is_divided(script: Script, name: str) -> bool:
    return any(
        isinstance(node, (ast.BinOp, ast.AugAssign))
        and isinstance(node.op, (ast.Div, ast.FloorDiv))
        and last_name(node.left if isinstance(node, ast.BinOp) else node.target) == name
        for node in script.tree.nodes
    )


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
