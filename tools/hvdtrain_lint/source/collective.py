"""Which calls are collective: every rank has to make them, or those that do wait forever."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

from hvdtrain_lint.source.names import HVD
from hvdtrain_lint.source.script import Script

_HVD = re.compile(
    rf"{HVD}\.(((grouped_)?(allreduce|allgather|reducescatter)|broadcast|alltoall)(_async)?_?"
    r"|broadcast_(parameters|optimizer_state|object|variables|global_variables)"
    r"|allgather_object|barrier)"
)
_TORCH = re.compile(
    r"torch\.distributed\.((all_)?(reduce|gather)|all_(reduce|gather)_coalesced|reduce_scatter"
    r"|reduce_scatter_tensor|all_gather_into_tensor|all_to_all(_single)?|broadcast|scatter"
    r"|(all_)?gather_object|(broadcast|scatter)_object_list|(monitored_)?barrier)"
)
_ACCELERATOR = {
    *("wait_for_everyone", "gather", "gather_for_metrics", "reduce", "pad_across_processes"),
}


def collective(script: Script, call: ast.Call) -> bool:
    """Return whether every rank has to make a call; not so if it is for a group of ranks."""
    name, owner, full = script.last(call), script.owner(call), script.full(call)
    if script.gives(call, "group", "process_set", "pg") or (call.args and name == "barrier"):
        return False
    if _TORCH.fullmatch(full) or (_HVD.fullmatch(full) and not script.joins):
        return True
    if name == "save_checkpoint" and script.imports("lightning", "pytorch_lightning"):
        return bool(script.made_by(owner, "Trainer"))
    return name in _ACCELERATOR and bool(script.made_by(owner, "Accelerator"))


def leads_to(
    script: Script, call: ast.Call, wanted: Callable[[Script, ast.Call], bool]
) -> ast.Call | None:
    """Return the wanted call that a call is, or that its function makes whatever it is given."""
    if wanted(script, call):
        return call
    called = script.called(call)
    if len(called) != 1:
        return None
    at = called[0], wanted
    if at not in script.inside:
        script.inside[at] = None  # a function that calls itself makes nothing more
        calls = (each for each in script.own(called[0]) if isinstance(each, ast.Call))
        sure = (each for each in calls if not _is_conditional(script, each))
        found = (leads_to(script, each, wanted) for each in sure)
        script.inside[at] = next(filter(None, found), None)
    return script.inside[at]


def averages_by_hvd(script: Script) -> bool:
    """Return whether an optimizer or a tape of Horovod's interface averages gradients."""
    wrappers = script.named("DistributedOptimizer", "DistributedGradientTape")
    return any(script.full(call).startswith(HVD) for call in wrappers)


def _is_conditional(script: Script, node: ast.AST) -> bool:
    kinds = (ast.If, ast.IfExp, ast.Try, ast.BoolOp)
    before = (each for statement in script.before(node) for each in ast.walk(statement))
    is_inside = any(isinstance(holder, kinds) for holder, _ in script.within(node))
    return is_inside or any(isinstance(each, ast.Return) for each in before)
