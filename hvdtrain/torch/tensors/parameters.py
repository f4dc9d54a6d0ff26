"""The parameters of an optimizer and their names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return the parameters of all groups, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def rate_of(optimizer: torch.optim.Optimizer) -> float | None:
    """Return the learning rate of the first parameter group, if there is one."""
    rate = optimizer.param_groups[0].get("lr")
    return None if rate is None else float(rate)


def check_reduced(optimizer: torch.optim.Optimizer, reduced: Sequence[torch.nn.Parameter]) -> None:
    """Check that the gradients of all trainable parameters are reduced."""
    hooked = {id(parameter) for parameter in reduced}
    for number, parameter in enumerate(parameters_of(optimizer)):
        if parameter.requires_grad and id(parameter) not in hooked:
            raise RuntimeError(
                f"parameter {number} of the optimizer (shape {tuple(parameter.shape)}) was "
                "frozen when DistributedOptimizer was created, and is not frozen now: wrap "
                "the optimizer again after changing requires_grad"
            )


def name_parameters(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
) -> dict[int, str]:
    """Return the names of the optimizer's parameters, by id(parameter)."""
    parameters = parameters_of(optimizer)
    if named_parameters is None:
        return {id(p): f"allreduce.noname.{number}" for number, p in enumerate(parameters)}
    named = list(named_parameters)
    if any(not isinstance(pair, tuple) for pair in named):
        raise ValueError(
            "named_parameters must yield tuples (name, parameter): pass model.named_parameters()"
        )
    twice = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if twice:
        raise ValueError(f"named_parameters has names used twice: {', '.join(twice)}")
    names = {id(p): name for name, p in named}
    unnamed = sum(id(p) not in names for p in parameters)
    if unnamed:
        raise ValueError(
            f"named_parameters leaves {unnamed} of the optimizer's {len(parameters)} parameters "
            "without a name: pass model.named_parameters()"
        )
    return names
