"""Which calls are collective: every rank has to make them, or those that do wait forever."""

from __future__ import annotations

import ast

from hvdtrain_lint.source.names import HVD
from hvdtrain_lint.source.script import Script, keyword
from hvdtrain_lint.source.tree import Function, last_name, written

_HVD_OPERATIONS = {
    *("allreduce", "grouped_allreduce", "allgather", "grouped_allgather", "broadcast", "alltoall"),
    *("reducescatter", "grouped_reducescatter"),
}
_HVD_OTHERS = {
    *("broadcast_parameters", "broadcast_optimizer_state", "broadcast_object", "barrier"),
    *("allgather_object", "broadcast_variables", "broadcast_global_variables"),
}
_TORCH = {
    *("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter"),
    *("all_to_all", "all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("barrier", "monitored_barrier", "all_reduce_coalesced", "all_gather_coalesced"),
}
_ACCELERATOR = {
    *("wait_for_everyone", "gather", "gather_for_metrics", "reduce", "pad_across_processes"),
}
_GROUPS = ("group", "process_set", "pg")


def collective(script: Script, call: ast.Call) -> str | None:
    """Return how a call is written if every rank has to make it, else None.

    Calls for a group of ranks are none: some ranks need not make them.
    """
    if any(keyword(call, name) is not None for name in _GROUPS):
        return None
    if call.args and last_name(call) == "barrier":
        return None
    full = script.names.full(call) or ""
    module, _, last = full.rpartition(".")
    if module == HVD and _is_hvd_operation(last):
        return None if joins(script) else written(call)
    if module == "torch.distributed" and last in _TORCH:
        return written(call)
    if isinstance(call.func, ast.Attribute):
        owner = call.func.value
        if last_name(call) in _ACCELERATOR and _is_made_by(script, owner, "Accelerator"):
            return written(call)
        if last_name(call) == "save_checkpoint" and _is_lightning_trainer(script, owner):
            return written(call)
    return None


def joins(script: Script) -> bool:
    """Return whether ranks join(), after which others may continue without them."""
    return any(script.names.full(call) == f"{HVD}.join" for call in script.tree.calls)


def averages_by_hvd(script: Script) -> bool:
    """Return whether an optimizer or a tape of Horovod's interface averages gradients."""
    wanted = ("DistributedOptimizer", "DistributedGradientTape")
    return any((script.names.full(c) or "").startswith(HVD) for c in script.named(*wanted))


def collectives_of(script: Script, function: Function) -> list[ast.Call]:
    """Return the collective calls that a function makes whatever it is given."""
    return [
        node
        for node in script.tree.own(function)
        if isinstance(node, ast.Call)
        and collective(script, node)
        and not _is_conditional(script, node)
    ]


def _is_conditional(script: Script, node: ast.AST) -> bool:
    around = (holder for holder, _ in script.tree.within(node))
    if any(isinstance(holder, (ast.If, ast.IfExp, ast.Try, ast.BoolOp)) for holder in around):
        return True
    return any(
        isinstance(each, ast.Return)
        for statement in script.tree.before(node)
        for each in ast.walk(statement)
    )


def _is_hvd_operation(last: str) -> bool:
    base = last.removesuffix("_").removesuffix("_async")
    return base in _HVD_OPERATIONS or last in _HVD_OTHERS


def _is_made_by(script: Script, owner: ast.expr, maker: str) -> bool:
    origins = script.values.origins(owner)
    return any(isinstance(each, ast.Call) and script.names.last(each) == maker for each in origins)


def _is_lightning_trainer(script: Script, owner: ast.expr) -> bool:
    is_lightning = script.names.imports("lightning", "pytorch_lightning")
    return is_lightning and _is_made_by(script, owner, "Trainer")
