"""Weights and learning rates: at the start, by the number of ranks, and never averaged."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import islice
from math import nan

from hvdtrain_lint.rules.rule import Places
from hvdtrain_lint.rules.samples import equal_seeds
from hvdtrain_lint.source.data import train_batch_sizes
from hvdtrain_lint.source.script import Script
from hvdtrain_lint.source.tree import HVD, NAMES, constant, divided, last_name, path_of, words_in

_OPTIMIZERS = {
    *("SGD", "Adam", "AdamW", "RMSprop", "Adadelta", "Adagrad", "Adamax", "Nadam", "NAdam"),
    *("RAdam", "Lion", "LBFGS", "Ftrl", "Rprop", "Adafactor", "LAMB", "LARS"),
}
_TF1_OPTIMIZER = re.compile(r"^(?!Distributed)\w+Optimizer$")
_TOTAL = re.compile(r"(?i)(global|total)_?(train_?)?batch")
_TOTAL_HELP = re.compile(
    r"(?i)\b(total|global|overall)\b.{0,24}\bbatch|batch.{0,24}\b(over|across|of|on|for) all\b"
    r"|\b(over|across) all (ranks|gpus|workers|processes|devices)"
)
_EACH_HELP = re.compile(r"(?i)\b(per|each|every|single)\b")
# A rate that passes through these stays a rate.
_PASSING = {"int", "float", "round", "max", "abs"}
_SIGNS: dict[type[ast.operator], int] = {ast.Mult: 1, ast.Div: -1, ast.FloorDiv: -1}
_DEEPEST = 8
_OWN_OPTIMIZER = re.compile(r"torch\.optim\.(?!.*lr_scheduler)")
_OTHER_NORM = re.compile(
    r"torch\.nn\.(.*\.)?SyncBatchNorm(\.convert_sync_batchnorm)?"
    r"|(tensorflow|tf_keras|keras)\.(.*\.)?(Sync)?BatchNormalization"
)
_METRIC = re.compile(r"torchmetrics\.(?!functional\.)(.*\.)?(?!MetricCollection)[A-Z]\w+")
_COLLECTING = re.compile(r"(?i)reduce(?!lr)|gather|average")
_COUNTS = ("world_size", "num_replicas")
_WRAPPERS = ("DistributedOptimizer", "DistributedGradientTape")
# With these all ranks may read the same weights, or the library takes care of it.
_EQUAL_ANYWAY = re.compile(
    r"(?i)broadcast|bcast|elastic|load_state_dict|load_model|load_weights|from_pretrained|pretrained|sync"
    r"|restore|resume|^weights$"
)
_EXCHANGING = re.compile(
    r"(?i)Distributed(?!Sampler$|$)|FSDP|DDP|shard|reduce|gather|broadcast|scatter|send|recv|rpc|pipe"
    r"|parallel|deepspeed|mesh|replicate|average|join|horovod|hvd|elastic|apex"
)
_NOT_EXCHANGING = {
    *("distributed", "DistributedSampler", "init_process_group", "destroy_process_group"),
}


def hvd301(script: Script) -> Places:
    if {_size_factors(script, size) for size in train_batch_sizes(script)} == {-1}:
        for call, rate in _rates(script):
            if _size_factors(script, rate) > 0:
                what = "the rate is multiplied by the number of ranks"
                yield call, f"{what}, while the batch is divided by it"


def hvd302(script: Script) -> Places:
    for call, rate in _rates(script):
        if _size_factors(script, rate) > 1:
            yield call, "the rate is multiplied by the number of ranks twice"


def hvd303(script: Script) -> Places:
    for call in script.named("LearningRateWarmupCallback"):
        rate = script.keyword(call, "initial_lr")
        if rate is None or "scale" in last_name(rate).lower():
            continue
        if _size_factors(script, rate) == 0:
            yield call, "the warm-up begins at initial_lr / size() and ends at initial_lr"


def hvd304(script: Script) -> Places:
    if not (script.uses_hvd or script.named("DistributedDataParallel")):
        return
    if script.is_managed or "distribute" in script.words:
        return
    told = set(_arguments_for_all(script))
    shared = {last_name(each) for node in script.nodes if (each := divided(node))}
    for size in train_batch_sizes(script):
        names = [last_name(each) for each in (size, *script.origins(size))]
        name = next((each for each in names if _TOTAL.search(each) or each in told), "")
        if not name or name in shared or isinstance(size, ast.Call):
            continue
        if _size_factors(script, size) in (0, 1):
            yield size, f"each rank gets {name}, the batch that all ranks have together"


def _arguments_for_all(script: Script) -> Iterator[str]:
    for call in script.named("add_argument"):
        text = str(script.option(call, "help"))
        if _TOTAL_HELP.search(text) and not _EACH_HELP.search(text):
            for flag in (str(constant(each)) for each in call.args):
                if flag.startswith("--") and "batch" in flag + text:
                    yield flag[2:].replace("-", "_")


def _rates(script: Script) -> Iterator[tuple[ast.Call, ast.expr]]:
    """Yield the calls that make optimizers, and the learning rates that they get."""
    for call in script.calls:
        last = script.last(call)
        if last in _OPTIMIZERS or _TF1_OPTIMIZER.match(last):
            position = 1 if script.full(call).startswith("torch") else 0
            rate = script.keyword(call, "lr") or script.keyword(call, "learning_rate", position)
            if rate is not None:
                yield call, rate


def _size_factors(script: Script, node: ast.expr, depth: int = 0) -> float:
    """Return how often a product has the number of ranks as a factor; -1 if it is divided by it.

    nan where names have several values, or lead to none that is a number or an argument.
    """

    def of(each: ast.expr) -> float:
        return _size_factors(script, each, depth + 1)

    match node:
        case _ if depth > _DEEPEST:
            return nan
        case _ if script.is_size(node):
            return 1
        case ast.BinOp(left, operator, right):
            factors = of(left), of(right)
            return factors[0] + factors[1] * _SIGNS.get(type(operator), nan if any(factors) else 0)
        case ast.Call(_, [first, *_]) if last_name(node) in _PASSING:
            return of(first)
    # What it is assigned once, and what it is multiplied by later.
    found, firsts = 0.0, 0
    for value in script.values(node):
        match value, script.parent(value):
            case _, ast.AugAssign(op=operator):
                found += of(value) * _SIGNS.get(type(operator), nan)
            case ast.BinOp(left, operator, right), _ if path_of(left) == (path_of(node) or ""):
                found += of(right) * _SIGNS.get(type(operator), nan)
            case _:
                found += of(value)
                firsts += 1
    is_known = firsts == 1 or isinstance(node, (*NAMES, ast.Constant, ast.UnaryOp, ast.Subscript))
    return found if is_known and firsts <= 1 else nan


def hvd305(script: Script) -> Places:
    if script.starts_processes or "DataParallel" in script.words:
        return
    for node in filter(script.runs_on_ranks, script.nodes):
        given: list[tuple[str | None, ast.expr]] = []
        if isinstance(node, ast.Assign):
            given = [(last_name(each), node.value) for each in node.targets]
        elif isinstance(node, ast.keyword):
            given = [(node.arg, node.value)]
        elif isinstance(node, ast.BinOp) and (what := _scaled(script, node)):
            yield node, f"the {what} depends on the number of GPUs of this node"
        for name, value in given:
            if name in _COUNTS and _is_device_count(script, value):
                yield value, f"{name} is the number of GPUs of this node"


def _is_device_count(script: Script, node: ast.expr) -> bool:
    is_reported = last_name(node) in _COUNTS
    return not is_reported and set(script.makers(node)) == {"torch.cuda.device_count"}


def _scaled(script: Script, node: ast.BinOp) -> str:
    """Return what is scaled by the number of GPUs, unless the script means that of a node."""
    if not _is_device_count(script, node.right):
        return ""
    told = (script.option(call, "help") for call in script.named("add_argument"))
    if any("node" in str(each) for each in told):
        return ""
    words = {word.lower() for word in words_in(node.left)}
    if divided(node):
        sizes = script.origins(*train_batch_sizes(script))
        return "batch" if node in sizes or any("batch" in word for word in words) else ""
    rates = script.origins(*(rate for _, rate in _rates(script)))
    is_rate = node in rates or words & {"lr", "learning_rate", "base_lr"}
    return "rate" if is_rate and isinstance(node.op, ast.Mult) else ""


def hvd501(script: Script) -> Places:
    if script.frameworks != {"keras"}:
        yield from _unequal_start(script)


def hvd502(script: Script) -> Places:
    if script.frameworks == {"keras"} and script.named("fit"):
        yield from _unequal_start(script)


def _unequal_start(script: Script) -> Places:
    if equal_seeds(script) or any(map(_EQUAL_ANYWAY.search, script.words)):
        return
    wrappers = script.named(*_WRAPPERS) if script.uses_hvd else []
    own = (call for call in wrappers if script.full(call).startswith(HVD))
    for call in islice(filter(script.runs_on_ranks, own), 1):
        yield call, "the script broadcasts nothing"


def hvd503(script: Script) -> Places:
    sent = script.named("broadcast_parameters")
    for call in script.named("load_state_dict") if sent else ():
        same = (each for each in sent if script.scope(each) is script.scope(call))
        earlier = [each for each in same if each.lineno < call.lineno]
        if earlier == sent and not script.named("broadcast_object") and script.sure(call):
            line = sent[-1].lineno
            yield call, f"some ranks load weights that were broadcast before, in line {line}"


def hvd504(script: Script) -> Places:
    if not script.uses_hvd or script.named(*_WRAPPERS) or script.has_trainer:
        return
    if not any(re.search(r"reduce|Distributed\w*Optimizer", word) for word in script.words):
        yield from _own_step(script, "the optimizer is not wrapped")


def hvd505(script: Script) -> Places:
    if script.uses_hvd or script.is_managed or not script.named("init_process_group"):
        return
    if not any(_EXCHANGING.search(word) for word in script.words - _NOT_EXCHANGING):
        yield from _own_step(script, "the model is not wrapped in DistributedDataParallel")


def hvd506(script: Script) -> Places:
    if not script.uses_hvd or script.has_trainer or script.named("init_process_group"):
        return
    for call in script.calls:
        full, asked = script.full(call), script.option(call, "synchronized") is True
        if _OTHER_NORM.fullmatch(full) and (asked or "Sync" in full):
            yield call, f"{script.last(call)}() normalizes without the other ranks"
    called = {script.last(call) for call in script.calls}
    for call in script.calls:  # functions that are passed on
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        names = [each.attr for each in given if isinstance(each, ast.Attribute)]
        called.update(name for name in names if name[0].islower())
    of_lightning = any("lightning" in word.lower() for word in script.words)
    if not of_lightning and not any(map(_COLLECTING.search, called)):
        for call in script.calls:
            own = script.keyword(call, "dist_sync_fn") is None
            if own and _METRIC.fullmatch(script.full(call)):
                yield call, f"{script.last(call)}() counts the samples of this rank alone"


def _own_step(script: Script, what: str) -> Places:
    """Yield the first step on all ranks of an optimizer that this script makes; it has backward."""
    for call in script.everywhere(script.named("step")) if script.named("backward") else ():
        owner = script.owner(call)
        if owner and all(map(_OWN_OPTIMIZER.match, script.makers(owner))):
            yield call, what
            return
