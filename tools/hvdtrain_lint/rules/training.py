"""Weights and learning rates: at the start, by the number of ranks, and never averaged."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from hvdtrain_lint.rules.rule import Found, rule
from hvdtrain_lint.rules.samples import equal_seeds
from hvdtrain_lint.source.data import train_batch_sizes
from hvdtrain_lint.source.names import HVD
from hvdtrain_lint.source.script import Script, keyword
from hvdtrain_lint.source.tree import last_name, words_in

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
_COUNTS = ("world_size", "num_replicas")
_DEVICES = {"torch.cuda.device_count"}
_WRAPPERS = ("DistributedOptimizer", "DistributedGradientTape")
# With these all ranks may read the same weights, or the library takes care of it.
_EQUAL_ANYWAY = re.compile(
    r"broadcast|bcast|elastic|load_state_dict|load_model|load_weights|from_pretrained|pretrained|sync"
    r"|restore|resume|^weights$",
    re.IGNORECASE,
)
_EXCHANGING = re.compile(
    r"Distributed(?!Sampler$|$)|FSDP|DDP|shard|reduce|gather|broadcast|scatter|send|recv|rpc|pipe"
    r"|parallel|deepspeed|mesh|replicate|average|join|horovod|hvd|elastic|apex",
    re.IGNORECASE,
)


def _rates(script: Script) -> Iterator[tuple[ast.Call, ast.expr]]:
    for call in script.tree.calls:
        last = script.names.last(call)
        if last not in _OPTIMIZERS and not _TF1_OPTIMIZER.match(last):
            continue
        of_torch = (script.names.full(call) or "").startswith("torch")
        rate = keyword(call, "lr") or keyword(call, "learning_rate", 1 if of_torch else 0)
        if rate is not None:
            yield call, rate


@rule(
    "HVD301",
    "a scaled learning rate with a batch that does not grow",
    "all ranks together have the batch of one rank, for which the rate is too high",
    "scale the rate by size(), or divide the batch by it, not both",
)
def _scaled_without_need(script: Script) -> Iterator[Found]:
    sizes = [_size_factors(script, size) for size in train_batch_sizes(script)]
    if not sizes or any(size != -1 for size in sizes):
        return
    for call, rate in _rates(script):
        if (_size_factors(script, rate) or 0) > 0:
            yield Found(
                call,
                "the rate is multiplied by the number of ranks, while the batch is divided by it",
            )


@rule(
    "HVD302",
    "a learning rate that is scaled twice",
    "it grows with the square of the number of ranks",
    "multiply it by size() in one place",
)
def _scaled_twice(script: Script) -> Iterator[Found]:
    for call, rate in _rates(script):
        if (_size_factors(script, rate) or 0) > 1:
            yield Found(call, "the rate is multiplied by the number of ranks twice")


@rule(
    "HVD303",
    "a warm-up to a learning rate that is not scaled",
    "training ends up with the rate of one rank",
    "give the scaled rate: initial_lr=rate * hvd.size()",
)
def _warm_up(script: Script) -> Iterator[Found]:
    for call in script.named("LearningRateWarmupCallback"):
        rate = keyword(call, "initial_lr")
        if rate is None or "scale" in last_name(rate).lower() or _size_factors(script, rate) != 0:
            continue
        yield Found(call, "the warm-up begins at initial_lr / size() and ends at initial_lr")


@rule(
    "HVD304",
    "the batch of all ranks given to each rank",
    "it is size() times as large as its name, or its help, says",
    "divide it by the number of ranks",
)
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


@rule(
    "HVD305",
    "torch.cuda.device_count() taken for the number of ranks",
    "that is not the number of ranks on several nodes, or where a rank sees one GPU",
    "use size() or get_world_size()",
)
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
    given = (each for _, rate in _rates(script) for each in script.values.origins(rate))
    is_rate = words & {"lr", "learning_rate", "base_lr"} or node in given
    return "rate" if isinstance(node.op, ast.Mult) and is_rate else ""


def _is_device_count(script: Script, node: ast.expr) -> bool:
    origins = script.values.origins(node)
    return bool(origins) and all(
        isinstance(each, ast.Call) and script.names.full(each) in _DEVICES for each in origins
    )


def _unequal_start(script: Script, keras: bool) -> Iterator[Found]:
    if not script.uses_hvd or equal_seeds(script):
        return
    if any(_EQUAL_ANYWAY.search(word) for word in script.words):
        return
    for call in script.named(*_WRAPPERS):
        full = script.names.full(call) or ""
        if full.startswith(HVD) and script.calls.runs_on_ranks(call) and _is_keras(script) == keras:
            yield Found(call, "the script broadcasts nothing")
            return


def _is_keras(script: Script) -> bool:
    return script.names.frameworks == {"keras"}


@rule(
    "HVD501",
    "no broadcast of the weights at the start",
    "every rank starts from weights of its own, and they stay different",
    "call hvd.broadcast_parameters(model.state_dict(), root_rank=0) and "
    "broadcast_optimizer_state(); in TensorFlow broadcast_variables()",
)
def _torch_start(script: Script) -> Iterator[Found]:
    yield from _unequal_start(script, keras=False)


@rule(
    "HVD502",
    "Keras without BroadcastGlobalVariablesCallback",
    "every rank starts from weights of its own, and they stay different",
    "add hvd.callbacks.BroadcastGlobalVariablesCallback(0) to the callbacks of all ranks",
)
def _keras_start(script: Script) -> Iterator[Found]:
    if script.named("fit"):
        yield from _unequal_start(script, keras=True)


@rule(
    "HVD503",
    "weights that one rank loads after the broadcast",
    "ranks continue with different weights",
    "load first, then broadcast",
)
def _loaded_late(script: Script) -> Iterator[Found]:
    for call in script.named("load_state_dict"):
        if script.guards.sure(call) is None:
            continue
        scope = script.tree.scope(call)
        sent = [
            each
            for each in script.named("broadcast_parameters")
            if script.tree.scope(each) is scope
        ]
        anywhere = script.named("broadcast_parameters", "broadcast_object")
        if sent and len(anywhere) == len(sent) and all(e.lineno < call.lineno for e in sent):
            yield Found(
                call,
                f"some ranks load weights that were broadcast before, in line {sent[-1].lineno}",
            )


@rule(
    "HVD504",
    "an optimizer that is not wrapped, under Horovod's interface",
    "nothing averages gradients, so every rank trains a model of its own",
    "optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=...)",
)
def _never_averaged(script: Script) -> Iterator[Found]:
    if not script.uses_hvd or script.named(*_WRAPPERS) or script.has_trainer:
        return
    if any(re.search(r"reduce|Distributed\w*Optimizer", word) for word in script.words):
        return
    step = _own_step(script)
    if step is not None:
        yield Found(step, "the optimizer is not wrapped")


@rule(
    "HVD505",
    "a model that is not wrapped, under torch.distributed",
    "nothing averages gradients, so every rank trains a model of its own",
    "model = DistributedDataParallel(model), or hvdtrain.torch's DistributedOptimizer",
)
def _not_wrapped(script: Script) -> Iterator[Found]:
    if script.uses_hvd or script.has_trainer or script.uses_accelerate:
        return
    if not script.named("init_process_group"):
        return
    known = {"distributed", "DistributedSampler", "init_process_group", "destroy_process_group"}
    if any(_EXCHANGING.search(word) for word in script.words - known):
        return
    step = _own_step(script)
    if step is not None:
        yield Found(step, "the model is not wrapped in DistributedDataParallel")


def _own_step(script: Script) -> ast.Call | None:
    """Return a step on all ranks of an optimizer that this script makes, after backward()."""
    if not script.named("backward"):
        return None
    for call in script.everywhere(script.named("step")):
        if isinstance(call.func, ast.Attribute):
            makers = script.values.origins(call.func.value)
            if makers and all(_is_torch_optimizer(script, each) for each in makers):
                return call
    return None


def _is_torch_optimizer(script: Script, node: ast.expr) -> bool:
    if not isinstance(node, ast.Call) or not last_name(node):
        return False
    return (script.names.full(node) or "").startswith("torch.optim.") and "lr_scheduler" not in (
        script.names.full(node) or ""
    )
