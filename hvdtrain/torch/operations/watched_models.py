"""What torch's modules and optimizers do with parameters: reduce them already, or train them alone.

Imported with hvdtrain.torch: a model may be wrapped long before the first optimizer is (all local).
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook

from hvdtrain.core import context
from hvdtrain.errors import UnsupportedError
from hvdtrain.torch.operations.dynamo import disable_compile
from hvdtrain.torch.operations.parts import parameters_of

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
            register_optimizer_step_post_hook(self._note_step)

    def note_wrapped(self, optimizer: torch.optim.Optimizer) -> None:
        """Stop monitoring an optimizer whose gradients are reduced, and others of its parameters.

        A program may later train them with another one on a single rank, on purpose.
        """
        self._wrapped.add(optimizer)
        self._addresses -= _addresses(parameters_of(optimizer))

    @disable_compile
    def _note_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
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


# Of torch, by name: to import the second takes long. Its `replicate` makes the first.
FLATTENING = "FullyShardedDataParallel"
_REDUCING = {"DistributedDataParallel", FLATTENING}
# What fully_shard adds to a parameter that it replaces, since torch 2.13.
_REPLACED = "_fsdp_orig_uid"
# What finds the parameters of a model; it keeps none of them alive.
_reducing: weakref.WeakKeyDictionary[torch.nn.Module, Callable[[], list[torch.nn.Parameter]]]
_reducing = weakref.WeakKeyDictionary()
# The names of the parameters that a DistributedOptimizer claims, by their id.
CLAIMS: weakref.WeakKeyDictionary[Any, Mapping[int, str]] = weakref.WeakKeyDictionary()


def is_flattened() -> bool:
    """Return whether a model is alive whose parameters were replaced by flat ones."""
    return any(FLATTENING in _kinds(model) for model in _reducing)


def _kinds(model: torch.nn.Module) -> set[str]:
    return {kind.__name__ for kind in type(model).__mro__}


def _reduced_by(
    model: torch.nn.Module, module: torch.nn.Module
) -> Callable[[], list[torch.nn.Parameter]]:
    """Return what finds the parameters whose gradients a model of torch reduces for a module."""
    if "DistributedDataParallel" in _kinds(model):
        left_out = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        named = module.named_parameters()
        # Those that are trainable now, whatever is frozen later.
        chosen = [weakref.ref(p) for name, p in named if name not in left_out and p.requires_grad]
        return lambda: [p for each in chosen if (p := each()) is not None]
    ignored = {id(p) for p in getattr(model, "_ignored_params", ())}
    reference = weakref.ref(module)  # FSDP replaces its parameters

    def find() -> list[torch.nn.Parameter]:
        found = reference()
        return [p for p in found.parameters() if id(p) not in ignored] if found else []

    return find


def reason(kind: str) -> str:
    """Return why a DistributedOptimizer cannot have a parameter, given torch's class."""
    return (
        f"is reduced or divided over ranks by torch's {kind} already: train it with the plain "
        f"optimizer, or leave out {kind}"
    )


def find_others(parameters: Iterable[torch.nn.Parameter]) -> dict[int, str]:
    """Return why torch reduces or divides parameters already, by id."""
    kinds = {"device_mesh": "DTensor", _REPLACED: "fully_shard"}
    found = {id(p): reason(k) for p in parameters for mark, k in kinds.items() if hasattr(p, mark)}
    for model, find in _reducing.items():
        found |= dict.fromkeys(map(id, find()), reason(type(model).__name__))
    return found


def _note_module(model: torch.nn.Module, _: str, module: torch.nn.Module | None) -> None:
    """Note a layer of torch, or a model that reduces gradients unless an optimizer has them."""
    if isinstance(module, torch.nn.SyncBatchNorm):
        _layers_of_torch.add(module)
    if module is None or _REDUCING.isdisjoint(_kinds(model)):
        return
    reduced = _reduced_by(model, module)
    claims = CLAIMS.values() if context.is_initialized() else ()
    names = {key: name for claimed in claims for key, name in claimed.items()}
    for name in [names[id(p)] for p in reduced() if id(p) in names]:
        raise UnsupportedError(
            f"parameter {name!r} of a DistributedOptimizer {reason(type(model).__name__)}"
        )
    _reducing.setdefault(model, reduced)


register_module_module_registration_hook(_note_module)
