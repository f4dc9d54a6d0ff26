"""Results of an evaluation that are not those of the test samples."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from hvdtrain.lint.rules.rule import Found, Rule
from hvdtrain.lint.source.data import is_true, rank_samplers
from hvdtrain.lint.source.names import HVD
from hvdtrain.lint.source.script import Script, keyword
from hvdtrain.lint.source.tree import last_name

__all__ = ["RULES"]

_PADDING = "DistributedSampler"
_DROP_POSITION = 5
# Names of what brings the results of ranks together, here or in another file.
_TOGETHER = re.compile(r"reduc|gather|averag|sync|metric|meter|collect|aggregat", re.IGNORECASE)
_MONITORING = ("ReduceLROnPlateau", "EarlyStopping")
_OWN_METRICS = {"loss", "accuracy", "acc"}


def _padded(script: Script) -> Iterator[Found]:
    if script.has_trainer or script.uses_accelerate or _cuts_to_length(script):
        return
    for call, for_evaluation in rank_samplers(script, _PADDING):
        if for_evaluation and not is_true(keyword(call, "drop_last", _DROP_POSITION)):
            yield Found(call, "DistributedSampler of the samples for evaluation repeats some")


def _cuts_to_length(script: Script) -> bool:
    """Return whether gathered results are cut, as in results[: len(dataset)]."""
    return any(
        isinstance(node, ast.Slice)
        and isinstance(node.upper, ast.Call)
        and last_name(node.upper) == "len"
        for node in script.tree.nodes
    )


def _one_share(script: Script) -> Iterator[Found]:
    if script.has_trainer or script.uses_accelerate:
        return
    if any(_TOGETHER.search(word) for word in script.words if word != "DistributedSampler"):
        return
    shown = [
        call
        for call in script.named("print", "info", "log_metric", "log_metrics", "add_scalar")
        if script.guards.sure(call) is not None
    ]
    if not shown:
        return
    for call, for_evaluation in rank_samplers(script, _PADDING):
        if for_evaluation:
            yield Found(
                call,
                "each rank evaluates its own share, no operation brings the results together, and "
                f"one rank shows its own (line {shown[0].lineno})",
            )


def _divided_twice(script: Script) -> Iterator[Found]:
    for node in script.tree.nodes:
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div):
            continue
        if script.ranks.is_size(node.right) and _is_average(script, node.left):
            yield Found(node, "allreduce() has averaged already, and is divided by size() again")


def _is_average(script: Script, node: ast.expr) -> bool:
    while isinstance(node, ast.Call) and script.names.full(node) != f"{HVD}.allreduce":
        if last_name(node) in ("item", "numpy", "cpu", "detach") and isinstance(
            node.func, ast.Attribute
        ):
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


def _own_decision(script: Script) -> Iterator[Found]:
    if not script.uses_hvd or "keras" not in script.names.frameworks:
        return
    for call in script.named(*_MONITORING):
        holder = script.tree.parent(call)
        after = holder.elts[holder.elts.index(call) :] if isinstance(holder, ast.List) else []
        late = any(last_name(each) == "MetricAverageCallback" for each in after)
        monitor = keyword(call, "monitor", 0)
        own = isinstance(monitor, ast.Constant) and monitor.value in _OWN_METRICS
        absent = "MetricAverageCallback" not in script.words and script.names.from_horovod
        if late or (absent and own):
            yield Found(call, f"{last_name(call)} sees the metric of its own rank")


RULES = (
    Rule(
        "HVD202",
        "evaluation with DistributedSampler, which pads",
        "unless their number is a multiple of the number of ranks, so the metric is not exact",
        "give rank r the samples r, r + size(), ... (hvdtrain.data.EvaluationSampler), and add up "
        "sums and counts over the ranks",
        _padded,
    ),
    Rule(
        "HVD203",
        "metrics of one rank's share shown as those of all samples",
        "which is the metric of a part of the samples",
        "add up sums and counts over the ranks (allreduce with op=Sum, or all_reduce), then divide",
        _one_share,
    ),
    Rule(
        "HVD204",
        "an average that is divided by the number of ranks again",
        "so the result is too small by that factor",
        "leave the division out, or use allreduce(..., op=Sum)",
        _divided_twice,
    ),
    Rule(
        "HVD205",
        "a Keras callback that decides by the metric of its own rank",
        "so ranks change the rate, or stop, at different times",
        "put MetricAverageCallback before it in the list of callbacks",
        _own_decision,
    ),
)
