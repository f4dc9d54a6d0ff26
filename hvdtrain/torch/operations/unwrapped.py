"""A warning for loops that make parameters equal and then train them on each rank alone. Local."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from hvdtrain.core import context
from hvdtrain.torch.tensors.compiling import uncompiled
from hvdtrain.torch.tensors.parameters import owned

__all__ = ["note_broadcast", "note_exchanged", "note_wrapped"]

# Programs that average weights now and then do so more often.
_STEPS = 100


@dataclass
class _Trained:
    """What an optimizer has done since parameters were broadcast.

    Attributes:
        elements: how many it trains.
        exchanged: elements that ranks had exchanged before its first step.
        steps: how many it has taken.
    """

    elements: int
    exchanged: int
    steps: int = 0


class _Watch:
    def __init__(self) -> None:
        self.exchanged = 0
        self._installed = False
        self._addresses: set[int] = set()
        self._wrapped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._trained: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Trained]
        self._trained = weakref.WeakKeyDictionary()

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        self._trained.clear()
        self._addresses |= _addresses(tensors)
        for optimizer in self._wrapped:
            self._addresses -= _addresses(owned(optimizer))
        if not self._installed:
            self._installed = True
            register_optimizer_step_post_hook(self._after_step)

    def wrap(self, optimizer: torch.optim.Optimizer) -> None:
        self._wrapped.add(optimizer)
        # Who goes on with them later, on one rank perhaps, knows what it takes to reduce.
        self._addresses -= _addresses(owned(optimizer))

    @uncompiled
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if not self._addresses or optimizer in self._wrapped or not context.is_initialized():
            return
        trained = self._trained.get(optimizer)
        if trained is None:
            trained = self._trained[optimizer] = self._begin(optimizer)
        trained.steps += 1
        if trained.steps != _STEPS or _in_torch_distributed():
            return
        if self.exchanged - trained.exchanged < trained.elements:
            self._addresses.clear()  # once is enough
            warnings.warn(
                f"{type(optimizer).__name__} took {_STEPS} steps on parameters that were broadcast "
                "before, and neither gradients nor weights were reduced in these steps: if each "
                "rank is to train the same model, wrap the optimizer: optimizer = "
                "hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())",
                stacklevel=6,  # the optimizer's step(), and what keeps this uncompiled
            )

    def _begin(self, optimizer: torch.optim.Optimizer) -> _Trained:
        parameters = owned(optimizer)
        equal = _addresses(parameters) <= self._addresses
        elements = sum(p.numel() for p in parameters) if equal else 0  # fewer are never exchanged
        return _Trained(elements, self.exchanged)


def _addresses(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {tensor.data_ptr() for tensor in tensors if tensor.numel()}


def _in_torch_distributed() -> bool:
    # torch may be built without it.
    return torch.distributed.is_available() and torch.distributed.is_initialized()


_watch = _Watch()


def note_broadcast(tensors: Iterable[torch.Tensor]) -> None:
    """Watch over optimizers of these tensors, which are equal on all ranks now."""
    topology = context.current().topology
    if topology.size > 1 and topology.rank == 0:
        _watch.broadcast(tensors)


def note_exchanged(tensors: Iterable[torch.Tensor]) -> None:
    """Count what ranks reduce or gather, which may be gradients or weights."""
    _watch.exchanged += sum(tensor.numel() for tensor in tensors)


def note_wrapped(optimizer: torch.optim.Optimizer) -> None:
    """Leave an optimizer alone whose gradients are reduced, and later ones of its parameters."""
    _watch.wrap(optimizer)
