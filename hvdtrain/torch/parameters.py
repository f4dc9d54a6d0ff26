"""Names of an optimizer's parameters. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

__all__ = ["name_parameters", "owned"]


def owned(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return the parameters of all groups, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def name_parameters(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
) -> dict[int, str]:
    """Return the name of each of the optimizer's parameters by its id.

    Raises:
        ValueError: a name is used twice, or a parameter has none.
    """
    parameters = owned(optimizer)
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
