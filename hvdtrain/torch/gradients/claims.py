"""Who reduces the gradient of a parameter: one optimizer, and no module of torch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch.nn.modules.module import register_module_module_registration_hook

from hvdtrain.collective import collective
from hvdtrain.core import context
from hvdtrain.errors import UnsupportedError
from hvdtrain.torch.gradients.buckets import Named, ParameterBuckets, ParameterSettings

_CLAIMS: weakref.WeakSet[ClaimedParameters] = weakref.WeakSet()
# Of torch, by name: to import the second takes long. Its `replicate` makes the first.
_FLATTENING = "FullyShardedDataParallel"
_REDUCING = {"DistributedDataParallel", _FLATTENING}
# What fully_shard adds to a parameter that it replaces, since torch 2.13.
_REPLACED = "_fsdp_orig_uid"
# What finds the parameters of a model; it keeps none of them alive.
_reducing: weakref.WeakKeyDictionary[torch.nn.Module, Callable[[], list[torch.nn.Parameter]]]
_reducing = weakref.WeakKeyDictionary()


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
        for other in _CLAIMS:
            if not self.names.keys().isdisjoint(other.names):
                other._later.add(self)
        _CLAIMS.add(self)

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
        flattened = not any(used) and any(_FLATTENING in _kinds(model) for model in _reducing)
        for name, parameter in self._named:
            if flattened or id(parameter) in others:
                why = others.get(id(parameter)) or _reason(_FLATTENING)
                raise UnsupportedError(f"parameter {name!r} of a DistributedOptimizer {why}")


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


def _reason(kind: str) -> str:
    return (
        f"is reduced or divided over ranks by torch's {kind} already: train it with the plain "
        f"optimizer, or leave out {kind}"
    )


def find_others(parameters: Iterable[torch.nn.Parameter]) -> dict[int, str]:
    """Return why torch reduces or divides parameters already, by id."""
    kinds = {"device_mesh": "DTensor", _REPLACED: "fully_shard"}
    found = {id(p): _reason(k) for p in parameters for mark, k in kinds.items() if hasattr(p, mark)}
    for model, find in _reducing.items():
        found |= dict.fromkeys(map(id, find()), _reason(type(model).__name__))
    return found


def _note_module(model: torch.nn.Module, _: str, module: torch.nn.Module | None) -> None:
    """Note a model that reduces gradients, unless an optimizer has parameters of it."""
    if module is None or _REDUCING.isdisjoint(_kinds(model)):
        return
    reduced = _reduced_by(model, module)
    claims = _CLAIMS if context.is_initialized() else ()
    names = {key: name for claim in claims for key, name in claim.names.items()}
    for name in [names[id(p)] for p in reduced() if id(p) in names]:
        raise UnsupportedError(
            f"parameter {name!r} of a DistributedOptimizer {_reason(type(model).__name__)}"
        )
    _reducing.setdefault(model, reduced)


register_module_module_registration_hook(_note_module)
