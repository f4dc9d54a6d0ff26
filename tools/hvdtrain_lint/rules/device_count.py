"""The number of devices of a node, taken for the number of ranks."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from hvdtrain_lint.rules.rates import rates
from hvdtrain_lint.rules.rule import Found, Rule
from hvdtrain_lint.source.data import train_batch_sizes
from hvdtrain_lint.source.script import Script, keyword
from hvdtrain_lint.source.tree import last_name, words_in

_COUNTS = ("world_size", "num_replicas")
_DEVICES = {"torch.cuda.device_count"}


def _devices_as_ranks(script: Script) -> Iterator[Found]:
    if script.calls.starts_processes or "DataParallel" in script.words:
        return
    for node in script.tree.nodes:
        if script.calls.runs_on_ranks(node):
            yield from _in_node(script, node)


def _in_node(script: Script, node: ast.AST) -> Iterator[Found]:
    if isinstance(node, ast.Assign) and _is_device_count(script, node.value):
        for target in node.targets:
            if last_name(target) in _COUNTS:
                yield Found(node, f"{last_name(target)} is the number of GPUs of this node")
    elif isinstance(node, ast.Call):
        for each in node.keywords:
            named = last_name(each.value) in _COUNTS
            if each.arg in _COUNTS and not named and _is_device_count(script, each.value):
                yield Found(each.value, f"{each.arg} is the number of GPUs of this node")
    elif isinstance(node, ast.BinOp) and last_name(node.right) not in _COUNTS:
        counts = _is_device_count(script, node.right) and not _is_of_node(script)
        if counts and (what := _scaled(script, node)):
            yield Found(node, f"the {what} depends on the number of GPUs of this node")


def _is_of_node(script: Script) -> bool:
    """Return whether the script says itself that it means the batch of a node."""
    told = [keyword(call, "help") for call in script.named("add_argument")]
    return any("node" in str(each.value) for each in told if isinstance(each, ast.Constant))


def _scaled(script: Script, node: ast.BinOp) -> str:
    words = {word.lower() for word in words_in(node.left)}
    if isinstance(node.op, (ast.Div, ast.FloorDiv)):
        sizes = (each for size in train_batch_sizes(script) for each in script.values.origins(size))
        is_batch = any("batch" in word for word in words) or node in sizes
        return "batch" if is_batch else ""
    given = (each for _, rate in rates(script) for each in script.values.origins(rate))
    is_rate = words & {"lr", "learning_rate", "base_lr"} or node in given
    return "rate" if isinstance(node.op, ast.Mult) and is_rate else ""


def _is_device_count(script: Script, node: ast.expr) -> bool:
    origins = script.values.origins(node)
    return bool(origins) and all(
        isinstance(each, ast.Call) and script.names.full(each) in _DEVICES for each in origins
    )


RULES = (
    Rule(
        "HVD305",
        "torch.cuda.device_count() taken for the number of ranks",
        "that is not the number of ranks on several nodes, or where a rank sees one GPU",
        "use size() or get_world_size()",
        _devices_as_ranks,
    ),
)
