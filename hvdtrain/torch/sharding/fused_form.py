"""How torch's fused optimizers compute on this machine, found by comparing bits (all local)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from hvdtrain.core.sharding.kernel import KINDS, KernelRule, load_kernel
from hvdtrain.core.sharding.kernel_step import Form, KernelStep, Place

# The state that the kernel changes for each element, in its order.
STATES: Mapping[type, tuple[str, ...]] = {
    torch.optim.SGD: ("momentum_buffer",),
    torch.optim.Adam: ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
}
_TYPES = (torch.float32, torch.float64)
# With and without AVX2, with AVX-512 and with NEON. The first are the usual ones.
_FORMS = [Form(contracts, width) for contracts in (True, False) for width in (32, 64, 16)]
_COUNT, _STEPS = 4 * 64 + 15, 3
_SGD: Sequence[Mapping[str, Any]] = (
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
    {"momentum": 0.7, "weight_decay": 0.1, "dampening": 0.3, "maximize": True},
)
_ADAM: Sequence[Mapping[str, Any]] = (
    {"weight_decay": 0.0},
    {"weight_decay": 0.1, "amsgrad": True},
    {"weight_decay": 0.1, "betas": (0.4, 0.9), "maximize": True},
)


def kernel_rule(kind: type, group: Mapping[str, Any]) -> KernelRule | None:
    """Return the settings of a parameter group for the kernel; None if it lacks one of them."""
    beta1, beta2 = group.get("betas", (0.0, 0.0))
    numbers = (
        *(group["lr"], group["weight_decay"], group.get("momentum", 0.0)),
        *(group.get("dampening", 0.0), beta1, beta2, group.get("eps", 0.0)),
    )
    plain = all(isinstance(number, (int, float)) for number in numbers)
    if not plain or not group.get("fused") or group.get("capturable"):
        return None
    decoupled = group.get("decoupled_weight_decay", kind is torch.optim.AdamW)
    name = "sgd" if kind is torch.optim.SGD else "adamw" if decoupled else "adam"
    return KernelRule(
        *numbers,
        kind=KINDS.index(name),
        maximize=group["maximize"],
        nesterov=group.get("nesterov", False),
        amsgrad=group.get("amsgrad", False),
    )


@cache
def find_form(kind: type) -> Form | None:
    """Return the form in which the kernel has the bits of an optimizer's fused steps."""
    if kind not in STATES or load_kernel() is None:
        return None
    return next((form for form in _FORMS if _agrees(kind, form)), None)


def _agrees(kind: type, form: Form) -> bool:
    try:
        return all(
            _same_bits(kind, {"lr": 0.1, "fused": True, **settings}, form, dtype)
            for settings in (_SGD if kind is torch.optim.SGD else _ADAM)
            for dtype in _TYPES
        )
    except (RuntimeError, TypeError):  # this torch has no fused steps on the CPU
        return False


def _same_bits(kind: type, settings: dict[str, Any], form: Form, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)

    def drawn() -> torch.Tensor:
        numbers = torch.randn(2, _COUNT, generator=generator, dtype=dtype, device="cpu")
        return numbers[0] * torch.exp(3 * numbers[1])

    weights = drawn()
    theirs = weights.clone()
    optimizer = kind([theirs], **settings)
    rule = kernel_rule(kind, optimizer.param_groups[0])
    if rule is None:
        return False
    gradient, steps = torch.empty_like(weights), torch.zeros((), dtype=torch.float32, device="cpu")
    state = [torch.zeros_like(weights) for _ in STATES[kind]]
    rest = form.rest(_COUNT, 0, _COUNT, weights.itemsize)
    addresses = [gradient.data_ptr()], [weights.data_ptr()]
    place = Place(*addresses, _COUNT, rest, 0, dtype is torch.float64)
    kernel = KernelStep([place], 1, 0, form)
    kernel.use_state(0, [array.data_ptr() for array in state], steps.data_ptr())
    for number in range(_STEPS):
        theirs.grad = drawn()
        gradient.copy_(theirs.grad)
        optimizer.step()
        kernel.select(0, True, number == 0)
        kernel.update([rule], None)
    kept = optimizer.state[theirs]
    return torch.equal(weights, theirs) and all(
        torch.equal(own, other) for own, other in _pairs(state, kept, STATES[kind])
    )


def _pairs(
    state: list[torch.Tensor], kept: Mapping[str, Any], names: tuple[str, ...]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for own, name in zip(state, names, strict=True):
        other = kept.get(name)
        if other is not None:
            yield own, other
