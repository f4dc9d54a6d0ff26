"""Which parameters torch's own wrappers, such as DDP and FSDP, reduce or divide.

Imported with hvdtrain.torch: a model may be wrapped long before the first optimizer is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook

from hvdtrain.core import context
from hvdtrain.errors import UnsupportedError

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
    """Note a model that reduces gradients, unless an optimizer has parameters of it."""
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
