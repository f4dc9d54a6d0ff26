"""The states of the ranks' own optimizers after an exchange of weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdtrain.collective import collective
from hvdtrain.core.gradients.inner_state import InnerState
from hvdtrain.core.objects import allgather_object
from hvdtrain.core.process_set import ProcessSet
from hvdtrain.torch.operations.grouped_allreduce import grouped_allreduce
from hvdtrain.types import ReduceOp

# Number of a parameter, and name of a tensor of its state.
_Name = tuple[int, str]
_COUNT = "step"  # which torch keeps as a floating point number


@collective
def settle_states(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.nn.Parameter],
    inner_state: InnerState,
    weight: float,
    process_set: ProcessSet,
) -> None:
    """Keep, average or forget the states of the ranks' optimizers (collective if averaged).

    The average of a tensor is s = sum_r(c_r s_r) / sum_r(c_r) over the ranks that have it. Counts
    of steps are not averaged.
    """
    if inner_state is InnerState.RESET:
        for parameter in parameters:
            optimizer.state.pop(parameter, None)
    elif inner_state is InnerState.AVERAGE:
        _average(optimizer, parameters, weight, process_set)


def _average(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.nn.Parameter],
    weight: float,
    process_set: ProcessSet,
) -> None:
    own = _tensors(optimizer, parameters)
    kinds = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in own.items()}
    channel = process_set.channel()
    gathered = allgather_object((weight, kinds), "states of optimizers", channel)
    everywhere = {name: kind for _, theirs in gathered for name, kind in theirs.items()}
    totals = {name: sum(each for each, theirs in gathered if name in theirs) for name in everywhere}
    names = sorted(name for name, total in totals.items() if total > 0)
    if not names:
        return
    sums = grouped_allreduce(
        [
            own[name] * (weight / totals[name])
            if name in own
            else _zeros(everywhere[name], parameters[name[0]].device)
            for name in names
        ],
        name="states of optimizers",
        op=ReduceOp.SUM,
        process_set=process_set,
    )
    for name, tensor in zip(names, sums, strict=True):
        if name in own:
            own[name].copy_(tensor)


def _tensors(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]
) -> dict[_Name, torch.Tensor]:
    """Return the tensors of a state that are averaged."""
    return {
        (index, name): value
        for index, parameter in enumerate(parameters)
        for name, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and name != _COUNT
    }


def _zeros(kind: tuple[tuple[int, ...], torch.dtype], device: torch.device) -> torch.Tensor:
    shape, dtype = kind
    return torch.zeros(shape, dtype=dtype, device=device)
