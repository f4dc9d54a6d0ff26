"""Which calls are collective: every rank has to make them, or those that do wait forever."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

from hvdtrain_lint.source.script import Script
from hvdtrain_lint.source.tree import Function, written
from hvdtrain_lint.source.values import HVD

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


def collective(script: Script, call: ast.Call) -> str | None:
    """Return how a call is written if every rank has to make it, else None.

    Calls for a group of ranks are none: some ranks need not make them.
    """
    name, owner = script.last(call), script.owner(call)
    if script.gives(call, "group", "process_set", "pg") or (call.args and name == "barrier"):
        return None
    full = script.full(call)
    found = bool(_TORCH.fullmatch(full) or (_HVD.fullmatch(full) and not script.joins))
    if owner is not None and not found:
        if name == "save_checkpoint" and script.imports("lightning", "pytorch_lightning"):
            found = bool(script.made_by(owner, "Trainer"))
        elif name in _ACCELERATOR:
            found = bool(script.made_by(owner, "Accelerator"))
    return written(call) if found else None


def inside(
    script: Script,
    call: ast.Call,
    wanted: Callable[[Script, ast.Call], object],
    above: tuple[Function, ...] = (),
) -> ast.Call | None:
    """Return the wanted call that a called function of the script makes whatever it is given."""
    called = script.called(call)
    if len(called) != 1 or called[0] in above:
        return None
    for each in script.own(called[0]):
        if not isinstance(each, ast.Call) or _is_conditional(script, each) or script.sure(each):
            continue
        if (
            found := each
            if wanted(script, each)
            else inside(script, each, wanted, (*above, *called))
        ):
            return found
    return None


def averages_by_hvd(script: Script) -> bool:
    """Return whether an optimizer or a tape of Horovod's interface averages gradients."""
    wrappers = script.named("DistributedOptimizer", "DistributedGradientTape")
    return any(script.full(call).startswith(HVD) for call in wrappers)


def _is_conditional(script: Script, node: ast.AST) -> bool:
    kinds = (ast.If, ast.IfExp, ast.Try, ast.BoolOp)
    return any(isinstance(holder, kinds) for holder, _ in script.within(node)) or any(
        isinstance(each, ast.Return)
        for statement in script.before(node)
        for each in ast.walk(statement)
    )
