"""Names and groups of an optimizer's parameters. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch

__all__ = ["Groups", "check_groups", "group_indices", "name_parameters", "owned"]

Groups = int | Sequence[Sequence[torch.Tensor]] | None


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


def check_groups(groups: Groups) -> None:
    """Refuse what is neither a number of groups nor lists of tensors.

    Raises:
        ValueError: it is something else, a number below 1, or a tensor is in it twice.
    """
    if groups is None:
        return
    if not isinstance(groups, list):
        if not isinstance(groups, int) or groups < 1:
            got = groups if isinstance(groups, int) else type(groups).__name__
            raise ValueError(
                "groups must be a number of groups, at least 1, or a list of lists of parameters, "
                f"got {got}"
            )
        return
    members = [member for group in groups for member in group]
    strange = [member for member in members if not isinstance(member, torch.Tensor)]
    if strange:
        raise ValueError(f"groups must hold parameters, got {strange[0]!r}")
    if len({id(member) for member in members}) < len(members):
        raise ValueError("groups has a parameter twice: it can only be in one group, once")


def group_indices(
    groups: Groups, parameters: Sequence[torch.nn.Parameter]
) -> tuple[tuple[int, ...], ...]:
    """Return groups of indices into `parameters`.

    Args:
        groups: how many groups of about the same number of parameters, or lists of parameters;
            one that is in no list is a group of its own.
        parameters: that need a gradient.
    """
    count = len(parameters)
    if groups is None:
        return ()
    if isinstance(groups, int):
        bounds = [count * number // groups for number in range(groups + 1)]
        cut = [tuple(range(a, b)) for a, b in pairwise(bounds)]
        return tuple(group for group in cut if group)
    number_of = {id(parameter): number for number, parameter in enumerate(parameters)}
    lists = [tuple(number_of[id(p)] for p in group if id(p) in number_of) for group in groups]
    grouped = {number for group in lists for number in group}
    alone = [(number,) for number in range(count) if number not in grouped]
    return tuple(group for group in [*lists, *alone] if group)
