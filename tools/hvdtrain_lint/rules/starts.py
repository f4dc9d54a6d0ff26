"""Ranks that start from different weights, or whose gradients are never averaged."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from hvdtrain_lint.rules.rule import Found, Rule
from hvdtrain_lint.rules.seeds import equal_seeds
from hvdtrain_lint.source.names import HVD
from hvdtrain_lint.source.script import Script
from hvdtrain_lint.source.tree import last_name

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


def _torch_start(script: Script) -> Iterator[Found]:
    yield from _unequal_start(script, keras=False)


def _keras_start(script: Script) -> Iterator[Found]:
    if script.named("fit"):
        yield from _unequal_start(script, keras=True)


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


def _never_averaged(script: Script) -> Iterator[Found]:
    if not script.uses_hvd or script.named(*_WRAPPERS) or script.has_trainer:
        return
    if any(re.search(r"reduce|Distributed\w*Optimizer", word) for word in script.words):
        return
    step = _own_step(script)
    if step is not None:
        yield Found(step, "the optimizer is not wrapped")


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


RULES = (
    Rule(
        "HVD501",
        "no broadcast of the weights at the start",
        "every rank starts from weights of its own, and they stay different",
        "call hvd.broadcast_parameters(model.state_dict(), root_rank=0) and "
        "broadcast_optimizer_state(); in TensorFlow broadcast_variables()",
        _torch_start,
    ),
    Rule(
        "HVD502",
        "Keras without BroadcastGlobalVariablesCallback",
        "every rank starts from weights of its own, and they stay different",
        "add hvd.callbacks.BroadcastGlobalVariablesCallback(0) to the callbacks of all ranks",
        _keras_start,
    ),
    Rule(
        "HVD503",
        "weights that one rank loads after the broadcast",
        "ranks go on with different weights",
        "load first, then broadcast",
        _loaded_late,
    ),
    Rule(
        "HVD504",
        "an optimizer that is not wrapped, under Horovod's interface",
        "nothing averages gradients, so every rank trains a model of its own",
        "optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=...)",
        _never_averaged,
    ),
    Rule(
        "HVD505",
        "a model that is not wrapped, under torch.distributed",
        "nothing averages gradients, so every rank trains a model of its own",
        "model = DistributedDataParallel(model), or hvdtrain.torch's DistributedOptimizer",
        _not_wrapped,
    ),
)
