"""Who reduces the gradient of a parameter: one optimizer, and no module of torch."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from hvdtrain.collective import collective
from hvdtrain.core import context
from hvdtrain.errors import UnsupportedError
from hvdtrain.torch.gradients.buckets import Named, ParameterBuckets, ParameterSettings
from hvdtrain.torch.tensors.wrappers import CLAIMS, FLATTENING, find_others, is_flattened, reason


class ClaimedParameters:
    """One optimizer's claim on its parameters, void while a later one of any of them exists.

    It has the buckets in which ranks exchange the parameters' gradients or weights.
    """

    @collective
    def __init__(
        self, optimizer: torch.optim.Optimizer, named: Named, settings: ParameterSettings
    ) -> None:
        self._optimizer, self._named, self._settings = optimizer, list(named), settings
        self.parameters = [parameter for _, parameter in named]
        self.names = {id(parameter): name for name, parameter in named}
        self.weight: float | None = None
        self._make_plan()
        self._later: weakref.WeakSet[ClaimedParameters] = weakref.WeakSet()
        for other, names in CLAIMS.items():
            if not self.names.keys().isdisjoint(names):
                other._later.add(self)
        CLAIMS[self] = self.names

    @collective
    def _make_plan(self) -> None:
        self.world = context.current()
        self.buckets = ParameterBuckets(self._named, self._settings)
        self._release = weakref.finalize(self, setattr, self.buckets.channel, "unused", True)

    @collective
    def _remake_plan(self) -> None:
        self._release()
        self._make_plan()

    @property
    def lost(self) -> bool:
        return len(self._later) > 0

    def check_claim(self) -> None:
        """Check that no later optimizer that still exists has one of the parameters."""
        for later in self._later:
            name = next(name for key, name in self.names.items() if key in later.names)
            raise RuntimeError(
                f"parameter {name!r} was given to another DistributedOptimizer later, and only "
                "the last one averages its gradient: step with that one, and delete this one or "
                "give it other parameters; or delete that one and all that refers to it, such as "
                "its learning rate schedulers"
            )

    def check_kept(self, used: Iterable[object]) -> None:
        """Check that FSDP has not replaced parameters, given which have gradients on some rank."""
        others = find_others(self.parameters)
        flattened = not any(used) and is_flattened()
        for name, parameter in self._named:
            if flattened or id(parameter) in others:
                why = others.get(id(parameter)) or reason(FLATTENING)
                raise UnsupportedError(f"parameter {name!r} of a DistributedOptimizer {why}")
