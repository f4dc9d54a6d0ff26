"""Warnings about parameters and layers that each rank trains alone by mistake (all local)."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook

from hvdtrain.core import context
from hvdtrain.torch.tensors.dynamo import disable_compile
from hvdtrain.torch.tensors.parts import parameters_of

# Programs that average weights only from time to time do so more often than this.
_STEPS = 100


@dataclass
class _Progress:
    """Steps of an optimizer since its parameters were broadcast."""

    elements: int
    exchanged: int
    steps: int = 0


class _DivergenceMonitor:
    def __init__(self) -> None:
        self.exchanged = 0
        self._installed = False
        self._addresses: set[int] = set()
        self._wrapped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._progress: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Progress]
        self._progress = weakref.WeakKeyDictionary()

    def note_exchanged(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count the elements that ranks reduce or gather, which may be gradients or weights."""
        self.exchanged += sum(tensor.numel() for tensor in tensors)

    def note_broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Monitor optimizers of these tensors, which are now equal on all ranks."""
        topology = context.current().topology
        if topology.size == 1 or topology.rank:
            return
        self._progress.clear()
        self._addresses |= _addresses(tensors)
        for optimizer in self._wrapped:
            self._addresses -= _addresses(parameters_of(optimizer))
        if not self._installed:
            self._installed = True
            register_optimizer_step_post_hook(self._after_step)

    def note_wrapped(self, optimizer: torch.optim.Optimizer) -> None:
        """Stop monitoring an optimizer whose gradients are reduced, and others of its parameters.

        A program may later train them with another one on a single rank, on purpose.
        """
        self._wrapped.add(optimizer)
        self._addresses -= _addresses(parameters_of(optimizer))

    @disable_compile
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if not self._addresses or optimizer in self._wrapped or not context.is_initialized():
            return
        progress = self._progress.get(optimizer)
        if progress is None:
            progress = self._progress[optimizer] = self._begin(optimizer)
        progress.steps += 1
        if progress.steps != _STEPS or in_torch_distributed():
            return
        if self.exchanged - progress.exchanged < progress.elements:
            self._addresses.clear()  # warn only once
            warnings.warn(
                f"{type(optimizer).__name__} took {_STEPS} steps on parameters that were broadcast "
                "before, and neither gradients nor weights were reduced in these steps: if each "
                "rank is to train the same model, wrap the optimizer: optimizer = "
                "hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())",
                stacklevel=6,  # the optimizer's step(), called through disable_compile()
            )

    def _begin(self, optimizer: torch.optim.Optimizer) -> _Progress:
        parameters = parameters_of(optimizer)
        equal = _addresses(parameters) <= self._addresses
        # With 0 elements the warning is never issued.
        elements = sum(p.numel() for p in parameters) if equal else 0
        return _Progress(elements, self.exchanged)


def _addresses(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {
        tensor.data_ptr()
        for tensor in tensors
        if not is_lazy(tensor) and tensor.layout is torch.strided and tensor.numel()
    }


def in_torch_distributed() -> bool:
    # torch may be built without it.
    return torch.distributed.is_available() and torch.distributed.is_initialized()


monitor = _DivergenceMonitor()


# An optimizer knows parameters and no layers, so torch tells of them as modules get them.
_layers_of_torch: weakref.WeakSet[torch.nn.SyncBatchNorm] = weakref.WeakSet()


def _note_layer(module: torch.nn.Module, name: str, layer: torch.nn.Module | None) -> None:
    if isinstance(layer, torch.nn.SyncBatchNorm):
        _layers_of_torch.add(layer)


register_module_module_registration_hook(_note_layer)


def warn_of_torch_layers(parameters: Iterable[torch.Tensor]) -> None:
    """Warn once, on rank 0, of layers that synchronize under torch.distributed only."""
    own, topology = set(map(id, parameters)), context.current().topology
    if topology.size == 1 or topology.rank or in_torch_distributed():
        return
    if any(id(layer.weight) in own for layer in _layers_of_torch):
        _layers_of_torch.clear()
        logging.getLogger("hvdtrain").warning(
            "torch.nn.SyncBatchNorm uses each rank's own batch, because it synchronizes under "
            "torch.distributed only: use hvd.SyncBatchNorm, which has the same arguments and state"
        )
