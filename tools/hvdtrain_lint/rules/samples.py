"""Data: how it is divided, ordered, counted and downloaded."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from hvdtrain_lint.rules.rule import Found, rule
from hvdtrain_lint.source.collective import averages_by_hvd, collective
from hvdtrain_lint.source.data import evaluates, is_every_nth, is_read_again, is_true, rank_samplers
from hvdtrain_lint.source.script import Script, keyword
from hvdtrain_lint.source.tree import last_name, path_of, words_in

_SAMPLERS = ("DistributedSampler", "GlobalBatchSampler", "ElasticSampler")
_SHUFFLE_POSITION = 3
_WRAPPERS = {"enumerate", "tqdm", "iter", "list", "zip"}
# These make loops of different lengths end together, or make them equal.
_JOINING = {"join", "Join", "joinable"}
_EQUALIZING = {"repeat", "take", "cycle"}
_SEEDING = re.compile(r"seed", re.IGNORECASE)
_SEEDS_TORCH = ("torch.manual_seed", "torch.random.manual_seed")
_DIVIDED = re.compile(r"shard|split|subset|partition|sampl|chunk|stream|iter|rank", re.IGNORECASE)
_KERAS_SETS = {
    *("mnist", "fashion_mnist", "cifar10", "cifar100", "imdb", "reuters", "boston_housing"),
    "california_housing",
}
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


@rule(
    "HVD201",
    "a sampler for ranks without set_epoch() in a script with epochs",
    "each epoch has the samples in the same order, and in the same batches",
    "call sampler.set_epoch(epoch) at the start of every epoch",
)
def _same_order(script: Script) -> Iterator[Found]:
    if "set_epoch" in script.words or script.has_trainer or script.uses_accelerate:
        return
    for call, for_evaluation in rank_samplers(script, *_SAMPLERS):
        shuffle = keyword(call, "shuffle", _SHUFFLE_POSITION)
        shuffles = shuffle is None or is_true(shuffle)
        if shuffles and not for_evaluation and is_read_again(script, call):
            name = script.names.last(call)
            yield Found(call, f"the script repeats epochs and never calls set_epoch() of {name}")


@rule(
    "HVD105",
    "a loop with collective operations that may be longer on some ranks",
    "some ranks take one step more than others, and wait in it forever",
    "give all ranks equally many (cut the rest off, or repeat and count steps), or use join()",
)
def _unequal(script: Script) -> Iterator[Found]:
    if script.words & _JOINING:
        return
    for node in script.tree.nodes:
        if not isinstance(node, ast.For) or not script.calls.runs_on_ranks(node):
            continue
        how = next(
            (h for each in _iterated(script, node.iter) if (h := _strided(script, each))), ""
        )
        if how and _waits(script, node):
            yield Found(node.iter, f"the loop runs over every size()-th {how}")


def _iterated(script: Script, node: ast.expr) -> list[ast.expr]:
    while isinstance(node, ast.Call) and last_name(node) in _WRAPPERS and node.args:
        node = node.args[0]
    return script.values.origins(node)


def _strided(script: Script, node: ast.expr) -> str:
    """Return what a rank's part consists of if others may have one more; else ""."""
    if is_every_nth(script, node):
        return "element of a sequence"
    links = []
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        links.append(node)
        origins = script.values.origins(node.func.value)
        node = origins[0] if len(origins) == 1 else node.func.value
    if any(last_name(link) in _EQUALIZING for link in links):
        return ""
    shards = [link for link in links if last_name(link) == "shard" and len(link.args) == 2]
    by_rank = any(
        script.ranks.is_rank(s.args[1]) and script.ranks.is_size(s.args[0]) for s in shards
    )
    return "sample of a data set" if by_rank else ""


def _waits(script: Script, loop: ast.For) -> bool:
    calls = [each for part in loop.body for each in ast.walk(part) if isinstance(each, ast.Call)]
    if any(collective(script, call) for call in calls):
        return True
    steps = any(last_name(call) in ("backward", "apply_gradients") for call in calls)
    return steps and (averages_by_hvd(script) or "DistributedDataParallel" in _wrapped(script))


def _wrapped(script: Script) -> set[str]:
    return {script.names.last(call) for call in script.tree.calls}


def equal_seeds(script: Script) -> list[ast.Call]:
    """Return the calls that seed a generator alike on all ranks, or may do so."""
    return [
        call
        for call in script.tree.calls
        if _SEEDING.search(script.names.last(call))
        and not any(script.ranks.mentions_rank(each) for each in call.args)
    ]


@rule(
    "HVD206",
    "the same seed and the same data on all ranks",
    "all ranks train on the same batches, and more ranks learn nothing more",
    "divide the data (DistributedSampler, GlobalBatchSampler), or seed with the rank",
)
def _same_batches(script: Script) -> Iterator[Found]:
    wraps = averages_by_hvd(script) or bool(script.named("DistributedDataParallel"))
    if not wraps or script.has_trainer or script.uses_accelerate:
        return
    seeds = [c for c in script.tree.calls if script.names.full(c) in _SEEDS_TORCH]
    alike = [c for c in script.everywhere(seeds) if c in equal_seeds(script)]
    if not alike or len(alike) != len(seeds):
        return
    for call in script.everywhere(script.named("DataLoader")):
        data = keyword(call, "dataset", 0)
        own = {each.arg for each in call.keywords} & {"sampler", "batch_sampler", "generator", None}
        if data is None or own or len(call.args) > 2 or not is_true(keyword(call, "shuffle")):
            continue
        if not evaluates(script, data) and not _is_divided(script, data):
            yield Found(
                call,
                f"all ranks have one seed (line {alike[0].lineno}) and the whole data set here",
            )


def _is_divided(script: Script, data: ast.expr) -> bool:
    return any(
        _DIVIDED.search(word)
        for each in [data, *script.values.origins(data)]
        for word in words_in(each)
    ) or any(script.ranks.mentions_rank(each) for each in script.values.origins(data))


@rule(
    "HVD207",
    "a random division of the data without a seed",
    "each rank divides differently, and trains on what others test with",
    "give it the same seed on all ranks: generator=torch.Generator().manual_seed(0), or "
    "random_state=0",
)
def _own_split(script: Script) -> Iterator[Found]:
    if equal_seeds(script):
        return
    for call in script.everywhere(script.named("random_split", "train_test_split")):
        last = script.names.last(call)
        if last == "random_split" and keyword(call, "generator", 2) is None:
            yield Found(call, "random_split() has no seed")
        elif last == "train_test_split" and not _is_seeded_split(call):
            yield Found(call, "train_test_split() has no seed")


def _is_seeded_split(call: ast.Call) -> bool:
    named = {each.arg for each in call.keywords}
    if None in named or "random_state" in named:
        return True
    shuffle = keyword(call, "shuffle")
    return shuffle is not None and not is_true(shuffle)


@rule(
    "HVD406",
    "a data set that all ranks download",
    "a rank may read files that another one is still writing",
    "let local_rank() 0 download it first, then barrier(), or put the rank into the path",
)
def _downloaded(script: Script) -> Iterator[Found]:
    downloads = [call for call in script.tree.calls if _downloads(script, call)]
    if _one_rank_is_first(script):
        return
    for call in script.everywhere(downloads):
        arguments = [*call.args, *(each.value for each in call.keywords)]
        if not any(script.ranks.mentions_rank(each) for each in arguments):
            yield Found(call, f"{path_of(call.func)}() downloads on all ranks at once")


def _downloads(script: Script, call: ast.Call) -> bool:
    asked = keyword(call, "download")
    if asked is not None and all(is_true(each) for each in script.values.origins(asked)):
        return True
    full = (script.names.full(call) or "").split(".")
    of_keras = script.names.imports("keras", "tensorflow")
    return of_keras and full[-1] == "load_data" and len(full) > 1 and full[-2] in _KERAS_SETS


def _one_rank_is_first(script: Script) -> bool:
    """Return whether a barrier or a download of one rank lets it come before the others."""
    return any(
        script.guards.perhaps(call)
        for call in script.tree.calls
        if last_name(call) in ("barrier", "wait_for_everyone")
        or "download" in last_name(call).lower()
        or _downloads(script, call)
    )


@rule(
    "HVD202",
    "evaluation with DistributedSampler, which pads",
    "the metric is exact only if the ranks divide their number",
    "give rank r the samples r, r + size(), ... (hvdtrain.data.EvaluationSampler), and add up "
    "sums and counts over the ranks",
)
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


@rule(
    "HVD203",
    "metrics of one rank's share shown as those of all samples",
    "what is shown is the metric of a part of the samples",
    "add up sums and counts over the ranks (allreduce with op=Sum, or all_reduce), then divide",
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


@rule(
    "HVD205",
    "a Keras callback that decides by the metric of its own rank",
    "ranks change the rate, or stop, at different times",
    "put MetricAverageCallback before it in the list of callbacks",
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
