"""Results of an evaluation that are not those of the test samples."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from hvdtrain_lint.rules.rule import Found, Rule
from hvdtrain_lint.source.data import is_true, rank_samplers
from hvdtrain_lint.source.script import Script, keyword
from hvdtrain_lint.source.tree import last_name

_PADDING = "DistributedSampler"
_DROP_POSITION = 5
# Names of what brings the results of ranks together, here or in another file.
_TOGETHER = re.compile(
    r"reduc|gather|averag|sync|metric|(?<!para)meter|collect|aggregat", re.IGNORECASE
)
# COCO's evaluators take every image once, by its number.
_BY_SAMPLE = re.compile(r"coco_?eval", re.IGNORECASE)
_MONITORING = ("ReduceLROnPlateau", "EarlyStopping")
_OWN_METRICS = {"loss", "accuracy", "acc"}


def _padded(script: Script) -> Iterator[Found]:
    if script.has_trainer or script.uses_accelerate or _counts_once(script):
        return
    for call, for_evaluation in rank_samplers(script, _PADDING):
        if for_evaluation and not is_true(keyword(call, "drop_last", _DROP_POSITION)):
            yield Found(call, "DistributedSampler repeats some of the samples for evaluation")


def _counts_once(script: Script) -> bool:
    """Return whether results are cut, as in results[: len(dataset)], or merged by the sample."""
    if any(_BY_SAMPLE.search(word) for word in script.words):
        return True
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


def _own_decision(script: Script) -> Iterator[Found]:
    if not script.uses_hvd or "keras" not in script.names.frameworks:
        return
    lists = [node for node in script.tree.nodes if isinstance(node, ast.List)]
    for call in script.named(*_MONITORING):
        late = any(_is_before_averages(script, call, each) for each in lists)
        monitor = keyword(call, "monitor", 0)
        own = isinstance(monitor, ast.Constant) and monitor.value in _OWN_METRICS
        absent = "MetricAverageCallback" not in script.words and script.names.from_horovod
        if late or (absent and own):
            yield Found(call, f"{last_name(call)} sees the metric of its own rank")


def _is_before_averages(script: Script, call: ast.Call, callbacks: ast.List) -> bool:
    made = [script.values.origins(each) for each in callbacks.elts]
    averages = [
        index
        for index, origins in enumerate(made)
        if any(last_name(each) == "MetricAverageCallback" for each in origins)
    ]
    return any(call in origins for origins in made[: max(averages, default=0)])


RULES = (
    Rule(
        "HVD202",
        "evaluation with DistributedSampler, which pads",
        "the metric is exact only if the ranks divide their number",
        "give rank r the samples r, r + size(), ... (hvdtrain.data.EvaluationSampler), and add up "
        "sums and counts over the ranks",
        _padded,
    ),
    Rule(
        "HVD203",
        "metrics of one rank's share shown as those of all samples",
        "what is shown is the metric of a part of the samples",
        "add up sums and counts over the ranks (allreduce with op=Sum, or all_reduce), then divide",
        _one_share,
    ),
    Rule(
        "HVD205",
        "a Keras callback that decides by the metric of its own rank",
        "ranks change the rate, or stop, at different times",
        "put MetricAverageCallback before it in the list of callbacks",
        _own_decision,
    ),
)
