"""Samplers that give the same order in every epoch."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from hvdtrain.lint.rules.rule import Found, Rule
from hvdtrain.lint.source.data import is_true, rank_samplers
from hvdtrain.lint.source.script import Script, keyword
from hvdtrain.lint.source.tree import last_name, words_in

__all__ = ["RULES"]

_SAMPLERS = ("DistributedSampler", "GlobalBatchSampler", "ElasticSampler")
_SHUFFLE_POSITION = 3


def _same_order(script: Script) -> Iterator[Found]:
    if "set_epoch" in script.words or script.has_trainer or script.uses_accelerate:
        return
    if not any(_runs_epochs(node) for node in script.tree.nodes):
        return
    for call, for_evaluation in rank_samplers(script, *_SAMPLERS):
        shuffle = keyword(call, "shuffle", _SHUFFLE_POSITION)
        if not for_evaluation and (shuffle is None or is_true(shuffle)):
            name = script.names.last(call)
            yield Found(call, f"the script repeats epochs and never calls set_epoch() of {name}")


def _runs_epochs(node: ast.AST) -> bool:
    if isinstance(node, ast.While):
        return _is_about_epochs(node.test)
    if not isinstance(node, (ast.For, ast.AsyncFor)):
        return False
    if isinstance(node.iter, ast.Call) and last_name(node.iter) == "range":
        bound = node.iter.args[0] if len(node.iter.args) == 1 else None
        if isinstance(bound, ast.Constant) and bound.value == 1:
            return False
    return _is_about_epochs(node.target) or _is_about_epochs(node.iter)


def _is_about_epochs(node: ast.AST) -> bool:
    return any("epoch" in word.lower() for word in words_in(node))


RULES = (
    Rule(
        "HVD201",
        "a sampler for ranks without set_epoch() in a script with epochs",
        "each epoch has the samples in the same order, and in the same batches",
        "call sampler.set_epoch(epoch) at the start of every epoch",
        _same_order,
    ),
)
