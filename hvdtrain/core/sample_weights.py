"""What this rank counts with in the steps of optimizers, for layers that add over ranks, too."""

from __future__ import annotations

import weakref
from collections.abc import Set
from itertools import count
from numbers import Real
from typing import Any, Protocol


class Weighted(Protocol):
    """The gradients of an optimizer, which ranks reduce with their weights."""

    def has(self, parameters: Set[int]) -> bool | None:
        """Return whether one of these objects, by id, is a parameter of it; None if one may be."""

    @property
    def weight(self) -> Any:
        """What this rank counts with: a number or tensor; None if ranks count alike."""


_live: weakref.WeakValueDictionary[int, Weighted] = weakref.WeakValueDictionary()
_numbers = count()


def register(optimizer: Weighted) -> None:
    """Let layers know the weight of an optimizer's gradients, while it exists."""
    _live[next(_numbers)] = optimizer


def sample_weight_of(parameters: Set[int]) -> Any:
    """Return what this rank counts with in a step of the last optimizer of these, by id.

    For parameters that no optimizer is known to have it is the weight of the last one that has a
    weight; None if different numbers were set. Values of tensors are not compared, since they may
    be known in a graph or on a device only.
    """
    found = [(each, each.has(parameters)) for _, each in sorted(_live.items(), reverse=True)]
    certain = any(has for _, has in found)
    asked = [each.weight for each, has in found if (has if certain else has is None)]
    weights = [weight for weight in asked if weight is not None]
    numbers = {float(weight) for weight in weights if isinstance(weight, Real)}
    return weights[0] if weights and (certain or len(numbers) < 2) else None
