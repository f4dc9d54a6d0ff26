"""Whether shared steps have the bits of those that each rank takes in full."""

from __future__ import annotations

import torch

from hvdtrain.collective import collective
from hvdtrain.core import context
from hvdtrain.core.objects import allgather_object
from hvdtrain.torch.sharding.fused_form import find_form, kernel_rule
from hvdtrain.torch.tensors.parameters import parameters_of

_TYPES = (torch.float32, torch.float64)


@collective
def shares_exactly(optimizer: torch.optim.Optimizer, name: str) -> bool:
    """Return whether shared steps of an optimizer have the bits of its own steps.

    `sharded=True` changes no bit of weights and state for steps of SGD, Adam and AdamW in their
    fused form, where all ranks share memory and the compiled kernel has the bits of this torch,
    unless gradients are clipped: their norms, also where they are only logged, may differ in the
    last bits. The result is also False if a rank has more threads than there are ranks: the kernel
    uses one of them, so that each would compute longer than with torch's own step.
    """
    return all(allgather_object(_can_share(optimizer), name=name))


def _can_share(optimizer: torch.optim.Optimizer) -> bool:
    kind: type = type(optimizer)
    slices = context.current().world.communicator.slices()
    if slices is None or slices.owners == 1 or slices.nodes > 1 or not slices.in_tree:
        return False
    if torch.get_num_threads() > slices.owners:
        return False
    parameters = parameters_of(optimizer)
    if not all(p.is_cpu and p.dtype in _TYPES and _has_own_memory(p) for p in parameters):
        return False
    storages = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    if len(storages) < len(parameters) or find_form(kind) is None:
        return False
    return all(kernel_rule(kind, group) is not None for group in optimizer.param_groups)


def _has_own_memory(parameter: torch.nn.Parameter) -> bool:
    return parameter.untyped_storage().nbytes() == parameter.nbytes > 0
