"""State that all ranks hold together, asked for by one, and steps that one rank takes alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from hvdtrain_lint.rules.rule import Found, Rule
from hvdtrain_lint.source.collective import joins
from hvdtrain_lint.source.names import HVD
from hvdtrain_lint.source.script import Script, keyword
from hvdtrain_lint.source.tree import last_name, path_of

_FSDP = {"FullyShardedDataParallel", "FSDP"}
_OF_CLASS = {"optim_state_dict", "full_optim_state_dict", "sharded_optim_state_dict"}
_CHECKPOINT = "torch.distributed.checkpoint"
_CHECKPOINT_CALLS = {
    *("save", "get_model_state_dict", "get_optimizer_state_dict", "get_state_dict"),
    *("save_state_dict",),
}
_STEPPED = re.compile(r"optim|^opt$|sched", re.IGNORECASE)
_MAKERS = re.compile(r"^torch\.optim\.|^hvd\.Distributed\w*Optimizer$|optimi[sz]er|scheduler", re.I)
_OTHER_PARALLELISM = ("torch.distributed.rpc", "torch.distributed.pipelining", "deepspeed")


def _sharded_state(script: Script) -> Iterator[Found]:
    for call in script.tree.calls:
        if not _is_gathered_state(script, call):
            continue
        branch = script.guards.sure(call)
        if branch is not None:
            written = f"{path_of(call.func) or last_name(call)}()"
            yield Found(
                call, f"{written} gathers parts of all ranks, and only some of them call it"
            )


def _is_gathered_state(script: Script, call: ast.Call) -> bool:
    full = script.names.full(call) or ""
    last = last_name(call)
    if full.startswith(f"{_CHECKPOINT}.") and last in _CHECKPOINT_CALLS:
        return True
    if not isinstance(call.func, ast.Attribute):
        return False
    if last in _OF_CLASS:
        return script.names.last(call.func.value) in _FSDP
    makers = [o for o in script.values.origins(call.func.value) if isinstance(o, ast.Call)]
    if last == "consolidate_state_dict":
        return any(script.names.last(maker) == "ZeroRedundancyOptimizer" for maker in makers)
    if last != "state_dict":
        return False
    if any(script.names.last(maker) in _FSDP for maker in makers):
        return True
    return "consolidate_state_dict" not in script.words and any(
        script.names.full(maker) == f"{HVD}.DistributedOptimizer" and _is_true(maker, "sharded")
        for maker in makers
    )


def _is_true(call: ast.Call, name: str) -> bool:
    value = keyword(call, name)
    return isinstance(value, ast.Constant) and value.value is True


def _stepped_alone(script: Script) -> Iterator[Found]:
    if script.names.imports(*_OTHER_PARALLELISM) or joins(script):
        return
    for call in script.tree.calls:
        if not isinstance(call.func, ast.Attribute) or call.func.attr != "step":
            continue
        if not _is_stepped(script, call.func.value):
            continue
        branch = script.guards.sure(call)
        if branch is None or not script.calls.runs_on_ranks(call):
            continue
        other = branch.holder.orelse if branch.taken else branch.holder.body
        if _steps(other):
            continue
        line = branch.holder.lineno
        yield Found(
            call, f"{path_of(call.func)}() runs on some ranks only (condition in line {line})"
        )


def _is_stepped(script: Script, owner: ast.expr) -> bool:
    """Return whether this is an optimizer or a scheduler: by what makes it, by name if unseen."""
    made = script.values.makers(owner)
    if not any(made):
        return bool(_STEPPED.search(last_name(owner)))
    return any(_MAKERS.search(name) for name in made)


def _steps(block: list[ast.stmt] | ast.expr) -> bool:
    nodes: list[ast.stmt] | list[ast.expr] = block if isinstance(block, list) else [block]
    return any(
        isinstance(each, ast.Call) and last_name(each) == "step"
        for node in nodes
        for each in ast.walk(node)
    )


RULES = (
    Rule(
        "HVD103",
        "the state of a sharded model or optimizer under a condition on the rank",
        "it waits for the parts of the others",
        "call it on all ranks, and let one rank write the result",
        _sharded_state,
    ),
    Rule(
        "HVD104",
        "an optimizer or a scheduler that steps on some ranks only",
        "learning rates or weights differ between ranks from then on",
        "take it out of the condition: every rank takes every step",
        _stepped_alone,
    ),
)
