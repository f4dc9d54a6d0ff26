"""Calls that not every rank makes, and barriers with nothing between them."""

from __future__ import annotations

import ast
import re
from itertools import pairwise

from hvdtrain_lint.rules.rule import Places
from hvdtrain_lint.source.guards import Branch
from hvdtrain_lint.source.script import Script, collective, leads_to
from hvdtrain_lint.source.tree import HVD, blocks, calls_in, last_name, written

_CALLBACKS = (
    *("BroadcastGlobalVariablesCallback", "BroadcastGlobalVariablesHook", "MetricAverageCallback"),
)
_FSDP = ("FullyShardedDataParallel", "FSDP")
_STATES = re.compile(r"((full_|sharded_)?optim_)?state_dict")
_CHECKPOINT = re.compile(
    r"torch\.distributed\.checkpoint\..*\b(save(_state_dict)?|get_((model|optimizer)_)?state_dict)"
)
_STEPPED = re.compile(r"(?i)optim|^opt$|sched")
_MAKERS = re.compile(r"(?i)^torch\.optim\.|^hvd\.Distributed\w*Optimizer$|optimi[sz]er|scheduler")
_OTHER_PARALLELISM = ("torch.distributed.rpc", "torch.distributed.pipelining", "deepspeed")
_BARRIERS = {"barrier", "wait_for_everyone", "monitored_barrier"}


def hvd101(script: Script) -> Places:
    for call, branch in script.on_some(script.calls):
        made = leads_to(script, call, collective)
        if made and not _others_join(script, call, branch, script.last(made)):
            yield call, _on_some(script, call, made, branch)


def _others_join(script: Script, call: ast.Call, branch: Branch, name: str) -> bool:
    """Return whether other ranks make a call of this name elsewhere, under a condition too."""
    others = (each for each in script.calls if each is not call)
    near = (each for each in others if script.scope(each) is script.scope(call))
    apart = (each for each in near if script.sure(each) not in (None, branch))
    made = (leads_to(script, each, collective) for each in apart)
    return any(each and script.last(each) == name for each in made)


def _on_some(script: Script, call: ast.Call, made: ast.Call, branch: Branch) -> str:
    what = written(call)
    if call is not made:
        what += f", which calls {written(made)},"
    elif script.last(call) != last_name(call):
        what += f", which is {script.last(call)}(),"
    return f"{what} runs on some ranks only (condition in line {branch.line})"


def hvd106(script: Script) -> Places:
    for call, branch in script.on_some(script.named(*_CALLBACKS)):
        if script.full(call).startswith(HVD):
            what = f"{script.last(call)} is on some ranks only"
            yield call, f"{what} (condition in line {branch.line})"


def hvd102(script: Script) -> Places:
    for call in script.calls:
        if not collective(script, call) or script.sure(call) or not (left := script.exits(call)):
            continue
        if not any(
            collective(script, c) or script.called(c, or_likely=True) for c in calls_in(left)
        ):
            what = f"{written(call)} is not reached by ranks that leave in line {left.lineno}"
            yield call, what


def hvd103(script: Script) -> Places:
    for call, _ in script.on_some(script.calls):
        if _is_gathered_state(script, call):
            yield call, f"{written(call)} gathers parts of all ranks, and only some of them call it"


def _is_gathered_state(script: Script, call: ast.Call) -> bool:
    owner, name = script.owner(call), script.last(call)
    if owner is None or _CHECKPOINT.fullmatch(script.full(call)):
        return bool(_CHECKPOINT.fullmatch(script.full(call)))
    if name == "consolidate_state_dict":
        return bool(script.made_by(owner, "ZeroRedundancyOptimizer"))
    if _STATES.fullmatch(name) and (script.last(owner) in _FSDP or script.made_by(owner, *_FSDP)):
        return True
    if name != "state_dict" or "consolidate_state_dict" in script.words:
        return False
    wrappers = script.made_by(owner, "DistributedOptimizer")
    return any(script.option(each, "sharded") is True for each in wrappers)


def hvd104(script: Script) -> Places:
    if script.imports(*_OTHER_PARALLELISM) or script.joins:
        return
    for call, branch in script.on_some(filter(script.runs_on_ranks, script.calls)):
        made = leads_to(script, call, _steps)
        elsewhere = calls_in(*branch.other)
        if made and not any(last_name(each) in ("step", last_name(call)) for each in elsewhere):
            yield call, _on_some(script, call, made, branch)


def _steps(script: Script, call: ast.Call) -> bool:
    """Return whether an optimizer or a scheduler steps: by what makes it, else by its name."""
    owner = script.owner(call)
    if owner is None or script.last(call) != "step":
        return False
    made = script.makers(owner)
    by_maker = any(map(_MAKERS.search, made))
    return by_maker if any(made) else bool(_STEPPED.search(last_name(owner)))


def hvd601(script: Script) -> Places:
    for block in (block for holder in script.nodes for block in blocks(holder)):
        for pair in pairwise(block):
            match pair:
                case (ast.Expr(ast.Call(_, [], []) as one), ast.Expr(ast.Call(_, [], []) as other)):
                    if {script.last(one), script.last(other)} <= _BARRIERS:
                        yield other, f"{written(other)} follows another one at once"
