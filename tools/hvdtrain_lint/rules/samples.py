"""Data: how it is divided, ordered, counted and downloaded."""

from __future__ import annotations

import ast
import re
from itertools import islice

from hvdtrain_lint.rules.rule import Places
from hvdtrain_lint.source.data import (
    WRAPPERS,
    evaluates,
    has_sampler,
    is_every_nth,
    is_read_again,
    rank_samplers,
    reads,
)
from hvdtrain_lint.source.script import Script, averages_by_hvd, collective
from hvdtrain_lint.source.tree import calls_in, last_name, words_in, written

_SAMPLERS = ("DistributedSampler", "GlobalBatchSampler", "ElasticSampler")
# These make loops of different lengths end together, or make them equal.
_JOINING = {"join", "Join", "joinable"}
_EQUALIZING = {"repeat", "take", "cycle"}
_SEEDING = re.compile(r"(?i)seed")
_SEEDS_TORCH = ("torch.manual_seed", "torch.random.manual_seed")
_DIVIDED = re.compile(r"(?i)shard|split|subset|partition|sampl|chunk|stream|iter|rank")
_TURNS = re.compile(r"(?i:download)|^(barrier|wait_for_everyone)$")
_KERAS_SETS = re.compile(
    r"(^|\.)((fashion_)?mnist|cifar100?|imdb|reuters|(boston|california)_housing)\.load_data$"
)
_PADDING = "DistributedSampler"
# Names of what brings the results of ranks together, here or in another file.
_TOGETHER = re.compile(r"(?i)reduc|gather|averag|sync|metric|(?<!para)meter|collect|aggregat")
# COCO's evaluators take every image once, by its number.
_BY_SAMPLE = re.compile(r"(?i)coco_?eval")
_MONITORING = ("ReduceLROnPlateau", "EarlyStopping")
_OWN_METRICS = {"loss", "accuracy", "acc"}


def hvd201(script: Script) -> Places:
    if "set_epoch" in script.words or script.is_managed:
        return
    for call, for_evaluation in rank_samplers(script, *_SAMPLERS):
        shuffles = script.option(call, "shuffle", 3, default=True) is True
        if shuffles and not for_evaluation and is_read_again(script, call):
            name = script.last(call)
            yield call, f"the script repeats epochs and never calls set_epoch() of {name}"


def hvd105(script: Script) -> Places:
    if script.words & _JOINING:
        return
    for loop in script.nodes:
        if not isinstance(loop, ast.For) or not script.runs_on_ranks(loop):
            continue
        read = reads(script, loop.iter, WRAPPERS)
        parts = (part for each in read if (part := _strided(script, each)))
        if (part := next(parts, "")) and _waits(script, loop):
            yield loop.iter, f"the loop runs over every size()-th {part}"


def _strided(script: Script, node: ast.expr) -> str:
    """Return what a rank's part consists of if others may have one more; else ""."""
    if is_every_nth(script, node):
        return "element of a sequence"
    chain: list[ast.expr] = [node]
    for each in chain:  # which grows: data.shard(size, rank).batch(8)
        owner = script.owner(each) if isinstance(each, ast.Call) else None
        origins = script.origins(owner)
        chain += origins if len(origins) == 1 and origins[0] not in chain else []
    calls = [each for each in chain if isinstance(each, ast.Call)]
    if any(script.last(each) in _EQUALIZING for each in calls):
        return ""
    parts = (script.given(each)[0] for each in calls if script.last(each) == "shard")
    by_rank = any(len(p) == 2 and script.is_size(p[0]) and script.is_rank(p[1]) for p in parts)
    return "sample of a data set" if by_rank else ""


def _waits(script: Script, loop: ast.For) -> bool:
    calls = calls_in(*loop.body)
    if any(collective(script, call) for call in calls):
        return True
    steps = any(last_name(call) in ("backward", "apply_gradients") for call in calls)
    return steps and (averages_by_hvd(script) or bool(script.named("DistributedDataParallel")))


def equal_seeds(script: Script) -> list[ast.Call]:
    """Return the calls that seed a generator alike on all ranks, or may do so."""
    seeds = (call for call in script.calls if _SEEDING.search(script.last(call)))
    return [call for call in seeds if not script.mentions_rank(*call.args)]


def hvd206(script: Script) -> Places:
    wraps = averages_by_hvd(script) or script.named("DistributedDataParallel")
    seeds = [call for call in script.calls if script.full(call) in _SEEDS_TORCH]
    if not wraps or not seeds or script.is_managed:
        return
    equal = equal_seeds(script)
    if any(call not in equal for call in seeds) or list(script.everywhere(seeds)) != seeds:
        return
    for call in script.everywhere(script.named("DataLoader")):
        data = script.keyword(call, "dataset", 0)
        own = has_sampler(script, call) or script.gives(call, "generator")
        if data is None or own or script.option(call, "shuffle", 2) is not True:
            continue
        origins = script.origins(data)
        divided = any(map(_DIVIDED.search, words_in(data, *origins)))
        if not divided and not script.mentions_rank(*origins) and not evaluates(script, data):
            line = seeds[0].lineno
            yield call, f"all ranks have one seed (line {line}) and the whole data set here"


def hvd207(script: Script) -> Places:
    if equal_seeds(script):
        return
    for call in script.everywhere(script.named("random_split", "train_test_split")):
        name = script.last(call)
        is_seeded = script.gives(call, "generator", "random_state", None)
        is_seeded |= name == "random_split" and len(script.given(call)[0]) > 2
        if not is_seeded and script.option(call, "shuffle", default=True) is True:
            yield call, f"{name}() has no seed"


def hvd406(script: Script) -> Places:
    downloads = [call for call in script.calls if _downloads(script, call)]
    # A barrier or a download of one rank lets it come before the others.
    turns = [call for call in script.calls if _TURNS.search(last_name(call))]
    if any(map(script.is_guarded, (*turns, *downloads))):
        return
    for call in script.everywhere(downloads):
        if not script.mentions_rank(*script.arguments(call)):
            yield call, f"{written(call)} downloads on all ranks at once"


def _downloads(script: Script, call: ast.Call) -> bool:
    of_keras = _KERAS_SETS.search(script.full(call)) and script.imports("keras", "tensorflow")
    asked = script.option(call, "download") is True and script.full(call) != "dict"
    return bool(of_keras) or asked


def hvd202(script: Script) -> Places:
    # Results may be cut, as in results[: len(dataset)].
    ends = [node.upper for node in script.nodes if isinstance(node, ast.Slice) and node.upper]
    is_cut = any(isinstance(end, ast.Call) and last_name(end) == "len" for end in ends)
    if script.is_managed or is_cut or any(map(_BY_SAMPLE.search, script.words)):
        return
    for call, for_evaluation in rank_samplers(script, _PADDING):
        if for_evaluation and script.option(call, "drop_last", 5) is not True:
            yield call, "DistributedSampler repeats some of the samples for evaluation"


def hvd203(script: Script) -> Places:
    words = script.words - {"DistributedSampler"}
    if script.is_managed or any(map(_TOGETHER.search, words)):
        return
    showing = script.named("print", "info", "log_metric", "log_metrics", "add_scalar")
    what = "each rank evaluates its own share, no operation brings the results together, and one"
    for shown, _ in islice(script.on_some(showing), 1):
        for call, for_evaluation in rank_samplers(script, _PADDING):
            if for_evaluation:
                yield call, f"{what} rank shows its own (line {shown.lineno})"


def hvd205(script: Script) -> Places:
    if not script.uses_hvd_keras:
        return
    absent = "MetricAverageCallback" not in script.words and script.from_horovod
    lists = [node.elts for node in script.nodes if isinstance(node, ast.List)]
    for call in script.named(*_MONITORING):
        late = any(_is_before_averages(script, call, each) for each in lists)
        if late or (absent and script.option(call, "monitor", 0) in _OWN_METRICS):
            yield call, f"{script.last(call)} sees the metric of its own rank"


def _is_before_averages(script: Script, call: ast.Call, callbacks: list[ast.expr]) -> bool:
    averages = [script.made_by(each, "MetricAverageCallback") for each in callbacks]
    last = max((index for index, made in enumerate(averages) if made), default=0)
    return call in script.origins(*callbacks[:last])
