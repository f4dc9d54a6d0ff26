"""Which of several optimizers of one parameter reduces its gradient: the last one that exists."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

_CLAIMS: weakref.WeakSet[Claim] = weakref.WeakSet()


class Claim:
    """One optimizer's claim on its parameters, void while a later one of any of them exists."""

    def __init__(self, parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        self.names = {id(parameter): name for name, parameter in parameters}
        self._later: weakref.WeakSet[Claim] = weakref.WeakSet()
        for other in _CLAIMS:
            if not self.names.keys().isdisjoint(other.names):
                other._later.add(self)
        _CLAIMS.add(self)

    @property
    def lost(self) -> bool:
        return len(self._later) > 0

    def check(self) -> None:
        """Check that no later optimizer that still exists has one of the parameters."""
        for later in self._later:
            name = next(name for key, name in self.names.items() if key in later.names)
            raise RuntimeError(
                f"parameter {name!r} was given to another DistributedOptimizer later, and only "
                "the last one averages its gradient: step with that one, and delete this one or "
                "give it other parameters; or delete that one and all that refers to it, such as "
                "its learning rate schedulers"
            )
