"""Calls that not every rank makes, and barriers with nothing between them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise

from hvdtrain_lint.rules.rule import Found, rule
from hvdtrain_lint.source.collective import collective, collectives_of, joins
from hvdtrain_lint.source.data import is_true
from hvdtrain_lint.source.guards import Branch
from hvdtrain_lint.source.names import HVD
from hvdtrain_lint.source.script import Script, keyword
from hvdtrain_lint.source.tree import blocks, last_name, path_of, written

_CALLBACKS = (
    *("BroadcastGlobalVariablesCallback", "BroadcastGlobalVariablesHook", "MetricAverageCallback"),
)
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
_BARRIERS = {"barrier", "wait_for_everyone", "monitored_barrier"}


@rule(
    "HVD101",
    "a collective operation under a condition on the rank",
    "the others never call it, so it waits forever",
    "call it on all ranks, and put only what one rank does with the result under the condition",
)
def _under_condition(script: Script) -> Iterator[Found]:
    for call in script.tree.calls:
        made = collective(script, call)
        inside = None if made else _collective_inside(script, call)
        if not made and not inside:
            continue
        branch = script.guards.sure(call)
        if branch is None or _others_join(script, call, branch, inside or last_name(call)):
            continue
        line = branch.holder.lineno
        if made:
            yield Found(call, f"{made} runs on some ranks only (condition in line {line})")
        else:
            yield Found(
                call,
                f"{last_name(call)}(), which calls {inside}(), runs on some ranks only "
                f"(condition in line {line})",
            )


@rule(
    "HVD106",
    "a callback or hook that communicates, under a condition on the rank",
    "it waits for the ranks that do not have it",
    "give it to all ranks; only callbacks that write belong under the condition",
)
def _callback(script: Script) -> Iterator[Found]:
    for call in script.named(*_CALLBACKS):
        branch = script.guards.sure(call)
        if branch is not None and (script.names.full(call) or "").startswith(HVD):
            line = branch.holder.lineno
            yield Found(call, f"{last_name(call)} is on some ranks only (condition in line {line})")


@rule(
    "HVD102",
    "a collective operation after some ranks have returned",
    "the ranks that reach it wait forever",
    "let all ranks reach it, and put what one rank does alone under a condition",
)
def _after_exit(script: Script) -> Iterator[Found]:
    for call in script.tree.calls:
        made = collective(script, call)
        left = script.guards.exits(call) if made else None
        if left is None or script.guards.sure(call) is not None:
            continue
        before_leaving = [node for node in ast.walk(left) if isinstance(node, ast.Call)]
        own = {function.name for function in script.tree.functions}
        if any(collective(script, each) or last_name(each) in own for each in before_leaving):
            continue
        yield Found(call, f"{made} is not reached by ranks that leave in line {left.lineno}")


def _collective_inside(script: Script, call: ast.Call) -> str | None:
    """Return the collective that a called function of the script makes in any case."""
    called = script.methods.called(call)
    if len(called) != 1:
        return None
    found = collectives_of(script, called[0])
    inside = next((each for each in found if script.guards.sure(each) is None), None)
    return last_name(inside) if inside is not None else None


def _others_join(script: Script, call: ast.Call, branch: Branch, name: str) -> bool:
    """Return whether other ranks make a call of this name elsewhere, under a condition too."""
    scope = script.tree.scope(call)
    for other in script.tree.calls:
        if other is call or script.tree.scope(other) is not scope:
            continue
        makes = last_name(other) == name or _collective_inside(script, other) == name
        elsewhere = script.guards.sure(other) if makes else None
        if elsewhere is not None and elsewhere != branch:
            return True
    return False


@rule(
    "HVD103",
    "the state of a sharded model or optimizer under a condition on the rank",
    "it waits for the parts of the others",
    "call it on all ranks, and let one rank write the result",
)
def _sharded_state(script: Script) -> Iterator[Found]:
    for call in script.tree.calls:
        if not _is_gathered_state(script, call):
            continue
        branch = script.guards.sure(call)
        if branch is not None:
            yield Found(
                call, f"{written(call)} gathers parts of all ranks, and only some of them call it"
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
        script.names.full(maker) == f"{HVD}.DistributedOptimizer"
        and is_true(keyword(maker, "sharded"))
        for maker in makers
    )


@rule(
    "HVD104",
    "an optimizer or a scheduler that steps on some ranks only",
    "learning rates or weights differ between ranks from then on",
    "take it out of the condition: every rank takes every step",
)
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


@rule(
    "HVD601",
    "barriers around nothing",
    "no rank does anything between them",
    "leave one of them out",
)
def _around_nothing(script: Script) -> Iterator[Found]:
    for holder in script.tree.nodes:
        for block in blocks(holder):
            for first, second in pairwise(block):
                call = _barrier(script, first)
                if call is not None and (again := _barrier(script, second)) is not None:
                    yield Found(again, f"{path_of(again.func)}() follows another one at once")


def _barrier(script: Script, statement: ast.stmt) -> ast.Call | None:
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or call.args or call.keywords:
        return None
    return call if script.names.last(call) in _BARRIERS else None
