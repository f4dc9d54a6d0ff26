"""Which optimizers can step on segments of parameters, and what they keep for them (all local)."""

from __future__ import annotations

import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hvdtrain.core.gradients.plan import ParameterSpec
from hvdtrain.core.sharding.segments import Quantity, newton_schulz_cost
from hvdtrain.errors import UnsupportedError
from hvdtrain.torch.operations.routes import dtype_of
from hvdtrain.types import DType

_Group = dict[str, Any]

# Each element of a parameter is updated by itself.
ELEMENTWISE = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad),
    *(torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD),
)
# These have a fused form on the CPU, which needs fewer passes over the memory.
_FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
# With half types that form gives wrong numbers on the CPU (torch 2.13).
_FUSED_TYPES = (torch.float32, torch.float64)
# Names of those that need whole parameters, and of those that cannot be shared at all.
_WHOLE = frozenset({"lars", "lamb", "muon"})
_REFUSED = frozenset({"lbfgs", "adafactor", "shampoo", "sparseadam"})
# State of which there is one number for a parameter, also for one with a single element.
_SINGLE = frozenset({"step", "eta", "mu", "mu_product"})


def needs_whole(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ranks must share an optimizer by whole parameters; refuse other optimizers.

    One that is not torch's own takes two steps on the halves of a small matrix, together and alone,
    with small and with large gradients.
    """
    kind = type(optimizer)
    _tell_of_replaced_step(optimizer)
    if kind in ELEMENTWISE:
        return False
    numbers = torch.randn(
        3, 24, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float64, device="cpu"
    )
    named, whole, alike = _names(kind), bool(_names(kind) & _WHOLE), True
    changed: list[str] = []
    for scale in (1.0, 1e6):  # some clip only large gradients
        numbers[1:] *= scale
        if whole:
            together = apart = numbers.view(3, 2, 3, 4).unbind(1)
        else:
            together, apart = (numbers.view(3, 6, 4),), numbers.split(12, dim=1)
        try:
            both, changed = _steps_of(optimizer, together)
            each = torch.cat([_steps_of(optimizer, [part])[0] for part in apart], dim=1)
            alike = alike and torch.allclose(both, each, rtol=1e-9, atol=1e-12, equal_nan=True)
        # It cannot step on other tensors.
        except (KeyError, RuntimeError, IndexError, TypeError, ValueError):
            alike = False
    if named & _REFUSED or not alike:
        what = "steps on all parameters together" if whole else "needs whole parameters"
        raise UnsupportedError(
            f"sharded=True: {kind.__name__} {what}, but ranks own parts of them: use "
            "sharded=False, or an elementwise optimizer such as SGD, Adam or AdamW"
        )
    if changed:
        warnings.warn(
            f"sharded=True: step() of {kind.__name__} changes {', '.join(changed)}, which later "
            "steps do not see, as each has an optimizer of its own on parts of the parameters: if "
            "they read that, use sharded=False, or keep it in the state of each parameter",
            stacklevel=2,
        )
    return whole


def _tell_of_replaced_step(optimizer: torch.optim.Optimizer) -> None:
    kind, step = type(optimizer), optimizer.__dict__.get("step")
    # A scheduler sets one that counts steps.
    if step is not None and getattr(step, "__wrapped__", None) is not kind.step:
        warnings.warn(
            f"sharded=True: step() of this {kind.__name__} was replaced, but ranks call that of "
            "its class on parts of parameters: if it does more, use sharded=False, or a subclass",
            stacklevel=2,
        )


def _names(kind: type) -> set[str]:
    return {base.__name__.lower() for base in kind.__mro__}


def _steps_of(
    optimizer: torch.optim.Optimizer, parts: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, list[str]]:
    """Return weights after steps in each group, [groups, elements], and what the last step changes.

    Parts have gradients, too. The changes are of numbers in attributes and groups, as counts.
    """
    groups = [
        ({**group, "lr": group.get("lr") or 0.1}, [part[0].clone() for part in parts])
        for group in optimizer.param_groups
    ]
    other = like(optimizer, groups)
    kept: list[dict[str, Any]] = []
    for number in range(1, len(parts[0])):
        for _, tensors in groups:
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.grad = part[number].clone()
        kept = [dict(each) for each in (other.__dict__, *other.param_groups)]
        other.step()
    now = [other.__dict__, *other.param_groups]
    changed = {
        repr(key)
        for before, after in zip(kept, now, strict=True)
        for key, value in after.items()
        if isinstance(value, (int, float)) and value != before.get(key)
    }
    weights = [torch.cat([each.flatten() for each in tensors]) for _, tensors in groups]
    return torch.stack(weights), sorted(changed)


def costs_of(optimizer: torch.optim.Optimizer, specs: Sequence[ParameterSpec]) -> list[int]:
    """Return what a step costs for each parameter, in any unit, the same on all ranks."""
    orthogonalizes = "muon" in _names(type(optimizer))
    return [newton_schulz_cost(s.shape) if orthogonalizes else s.count for s in specs]


def like(
    optimizer: torch.optim.Optimizer, groups: Sequence[tuple[_Group, list[torch.Tensor]]]
) -> torch.optim.Optimizer:
    """Return an optimizer of the same class and settings, without state and hooks."""
    other: torch.optim.Optimizer = object.__new__(type(optimizer))
    other.__dict__.update(optimizer.__dict__)
    other.__dict__.pop("step", None)  # a scheduler counts the steps of the user's optimizer there
    other.state = defaultdict(dict)
    other._optimizer_step_pre_hooks = OrderedDict()
    other._optimizer_step_post_hooks = OrderedDict()
    kind = type(optimizer)
    other.param_groups = [
        {**group, **fused_form(kind, group), "params": list(tensors)} for group, tensors in groups
    ]
    return other


def fused_form(kind: type, group: _Group) -> _Group:
    """Return the setting that selects the fused form on the CPU, where torch's default is slow.

    It is empty if the user has chosen a form. It depends on whole groups, because ranks that own
    parameters of different types need the same one.
    """
    if not all(p.is_cpu and p.dtype in _FUSED_TYPES for p in group["params"]):
        return {}
    chosen = any(group.get(key) is not None for key in ("foreach", "fused"))
    other = any(group.get(key) for key in ("differentiable", "capturable"))
    if kind not in _FUSED or chosen or other or isinstance(group.get("lr"), torch.Tensor):
        return {}
    return {"fused": True}


def quantities_of(
    optimizer: torch.optim.Optimizer,
    group: _Group,
    parameter: torch.Tensor,
    shape: tuple[int, ...],
) -> Mapping[str, Quantity]:
    """Return what an optimizer keeps for a parameter of a group.

    It is what the optimizer keeps already, and what it keeps after a step on a small tensor.
    """
    sample = torch.zeros(shape, dtype=parameter.dtype, device="cpu")
    sample.grad = torch.ones_like(sample)
    other = like(optimizer, [(group, [sample])])
    kept = optimizer.state.get(parameter, {})
    other.state[sample].update(
        {key: _sample(key, value, parameter, shape) for key, value in kept.items()}
    )
    other.step()
    found = {key: _quantity(key, value, shape) for key, value in other.state[sample].items()}
    return {key: quantity for key, quantity in found.items() if quantity is not None}


def is_elementwise(key: str, value: Any, shape: Sequence[int]) -> bool:
    """Return whether what an optimizer keeps has a number for each element of a tensor."""
    tensor = isinstance(value, torch.Tensor) and value.shape == tuple(shape)
    return tensor and key not in _SINGLE


def _sample(key: str, value: Any, parameter: torch.Tensor, shape: tuple[int, ...]) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if not is_elementwise(key, value, parameter.shape):
        return value.clone()
    return value.new_zeros(shape)


def _quantity(key: str, value: Any, shape: tuple[int, ...]) -> Quantity | None:
    if isinstance(value, torch.Tensor):
        return Quantity(key, dtype_of(value), value.shape == shape)
    if value is None:
        return None
    if not isinstance(value, (int, float)):
        raise UnsupportedError(
            f"sharded=True: the optimizer keeps {key!r}, a {type(value).__name__}, where only "
            "tensors and numbers can be shared: use sharded=False"
        )
    dtype = DType.INT64 if isinstance(value, int) else DType.FLOAT64
    return Quantity(key, dtype, elementwise=False, tensor=False)
