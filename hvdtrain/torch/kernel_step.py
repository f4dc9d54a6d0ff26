"""Steps of torch's optimizers in the compiled kernel, with the bits of this torch (all local)."""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from hvdtrain.core.update_kernel import (
    KINDS,
    Form,
    KernelRule,
    KernelStep,
    TensorSteps,
    load_kernel,
)
from hvdtrain.torch.operations import watched_models
from hvdtrain.torch.operations.routes import is_dense

# The state that the kernel changes for each element, in its order.
STATES: Mapping[type, tuple[str, ...]] = {
    torch.optim.SGD: ("momentum_buffer",),
    torch.optim.Adam: ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
}
TYPES = (torch.float32, torch.float64)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
# With and without AVX2, with AVX-512 and with NEON. The first are the usual ones.
_FUSED_FORMS = [Form(contracts, width) for contracts in (True, False) for width in (32, 64, 16)]
_ROOTS = ("vmsSqrt", "vmdSqrt")
_COUNT, _STEPS = 64 * 64 + 15, 3
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


def kernel_rule(kind: type, group: Mapping[str, Any], fused: bool = True) -> KernelRule | None:
    """Return the settings of a parameter group for the kernel; None if it lacks one of them."""
    beta1, beta2 = group.get("betas", (0.0, 0.0))
    numbers = (
        *(group["lr"], group["weight_decay"], group.get("momentum", 0.0)),
        *(group.get("dampening", 0.0), beta1, beta2, group.get("eps", 0.0)),
    )
    plain = all(isinstance(each, (int, float)) for each in numbers) and max(beta1, beta2) < 1
    other = any(group.get(key) for key in ("foreach", "capturable", "differentiable"))
    if not plain or other or bool(group.get("fused")) is not fused:
        return None
    decoupled = group.get("decoupled_weight_decay", kind is torch.optim.AdamW)
    name = "sgd" if kind is torch.optim.SGD else "adamw" if decoupled else "adam"
    return KernelRule(
        *numbers,
        kind=KINDS.index(name),
        maximize=bool(group["maximize"]),
        nesterov=bool(group.get("nesterov")),
        amsgrad=bool(group.get("amsgrad")),
    )


@cache
def find_form(kind: type, fused: bool = True) -> Form | None:
    """Return the form in which the kernel has the bits of an optimizer's fused or default steps."""
    if kind not in STATES or load_kernel() is None:
        return None
    forms = _FUSED_FORMS if fused else _default_forms()
    return next((form for form in forms if _agrees(kind, form, fused)), None)


def _default_forms() -> list[Form]:
    """Return forms of steps of several operations, each on a whole tensor."""
    roots = [(0, 0)]
    try:  # those of MKL, which torch takes where it is built with them
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        found = [ctypes.cast(library[name], ctypes.c_void_p).value for name in _ROOTS]
        roots.insert(0, (found[0] or 0, found[1] or 0))
    except (OSError, AttributeError):
        pass
    return [Form(contracts, 0, each) for contracts in (True, False) for each in roots]


def _agrees(kind: type, form: Form, fused: bool) -> bool:
    try:
        return all(
            _same_bits(kind, {"lr": 0.1, "fused": fused, **settings}, form, dtype)
            for settings in (_SGD if kind is torch.optim.SGD else _ADAM)
            for dtype in TYPES
        )
    except (RuntimeError, TypeError):  # this torch has no fused steps on the CPU
        return False


def _same_bits(kind: type, settings: dict[str, Any], form: Form, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)

    def drawn() -> torch.Tensor:
        numbers = torch.randn(2, _COUNT, generator=generator, dtype=dtype, device="cpu")
        numbers[0, ::5] = 0
        return numbers[0] * torch.exp(3 * numbers[1])

    weights = drawn()
    theirs = weights.clone()
    optimizer = kind([theirs], **settings)
    rule = kernel_rule(kind, optimizer.param_groups[0], settings["fused"])
    if rule is None:
        return False
    gradient, steps = torch.empty_like(weights), torch.zeros((), dtype=torch.float32, device="cpu")
    state = [torch.zeros_like(weights) for _ in STATES[kind]]
    kernel = KernelStep(
        [[weights.data_ptr()]],
        form,
        state=[array.data_ptr() for array in state] + [0] * (3 - len(state)),
        steps=steps.data_ptr(),
        count=_COUNT,
        rest=form.rest(_COUNT, 0, _COUNT, weights.itemsize),
        is_double=dtype is torch.float64,
    )
    kernel.gradients[:] = gradient.data_ptr()
    for number in range(_STEPS):
        theirs.grad = drawn()
        gradient.copy_(theirs.grad)
        optimizer.step()
        kernel.segments["begins"] = number == 0
        kernel.update([rule])
    kept = optimizer.state[theirs]
    pairs = [(own, kept.get(name)) for own, name in zip(state, STATES[kind], strict=True)]
    return torch.equal(weights, theirs) and all(
        other is None or torch.equal(own, other) for own, other in pairs
    )


class KernelSteps:
    """Takes an optimizer's steps in one pass over memory, with the bits of torch's own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._rows: list[_Row] = []
        self._steps: TensorSteps | None = None
        self._made_for: object = None

    def take(self) -> bool:
        """Take a step; return False, with nothing changed, where torch must.

        That is so for optimizers other than SGD, Adam and AdamW in their default form, with hooks,
        a step() of the program's own, parameters without a state yet, or tensors that the kernel
        does not know.
        """
        # Another mode of this thread flushes subnormal numbers to zero.
        usual = sys.float_info.min * 0.5
        kind: Any = type(self._optimizer)  # a program may set another class
        if kind not in STATES or not usual or not _is_torchs_own(self._optimizer):
            return False
        groups = self._optimizer.param_groups
        rules = [rule for g in groups if (rule := kernel_rule(kind, g, fused=False))]
        if len(rules) < len(groups) or (gradients := self._find_gradients(kind)) is None:
            return False
        if (form := find_form(kind, fused=False)) is None:
            return False
        # A forked child has no threads.
        made_for = torch.get_num_threads(), os.getpid(), form
        if self._steps is None or made_for != self._made_for:
            self._steps = TensorSteps([row.places for row in self._rows], made_for[0], form)
            self._made_for = made_for
        if not self._steps.are_apart(gradients):
            return False
        with torch.autograd.profiler.record_function(f"Optimizer.step#{kind.__name__}.step"):
            self._steps.take(gradients, rules)
            self._optimizer._optimizer_step_code()
        used = [row for row, address in zip(self._rows, gradients, strict=True) if address]
        changed = [tensor for row in used for each in row.tensors if (tensor := each()) is not None]
        torch.autograd.graph.increment_version(changed)
        if "step" in self._optimizer.__dict__:  # a scheduler's, which notes that it was called
            self._optimizer._opt_called = True  # type: ignore[attr-defined]
        return True

    def _find_gradients(self, kind: type) -> list[int] | None:
        """Return the address of each gradient, 0 without one; None where torch must step."""
        found: list[int] = []
        rows, state = self._rows, self._optimizer.state
        for number, group in enumerate(self._optimizer.param_groups):
            names = _names_of_state(kind, group)
            for parameter in group["params"]:
                gradient, place = parameter.grad, len(found)
                entry = state.get(parameter, {}) if gradient is not None else {}
                new = place == len(rows)
                if new or (
                    gradient is not None
                    and not rows[place].is_still(parameter, number, names, entry)
                ):
                    rows[place : place + 1] = [_Row(parameter, number, names, entry)]
                    self._steps = None
                found.append(0 if gradient is None else rows[place].address_of(gradient))
                if gradient is not None and not found[-1]:
                    return None
        if len(rows) > len(found):
            del rows[len(found) :]
            self._steps = None
        return found


def _names_of_state(kind: type, group: Mapping[str, Any]) -> tuple[str, ...]:
    if kind is torch.optim.SGD:
        return STATES[kind] if group["momentum"] else ()
    return (*STATES[kind][: 3 if group["amsgrad"] else 2], "step")


class _Row:
    """What the kernel must know of a parameter, as long as its tensors are where they were."""

    def __init__(
        self, parameter: torch.Tensor, number: int, names: Sequence[str], entry: Mapping[str, Any]
    ) -> None:
        tensors: list[Any] = [parameter, *(entry.get(name) for name in names)]
        self.places = [0] * 8
        self._number, self._names = number, names
        self._alike = parameter.dtype in TYPES and is_dense(parameter)
        if not self._alike:
            return
        self._form = parameter.dtype, parameter.nbytes, parameter.stride()
        for tensor, name in zip(tensors, ("", *names), strict=True):
            form = (torch.float32, 4, ()) if name == "step" else self._form
            self._alike &= _is_plain(tensor, *form) and not tensor.is_inference()
        if self._alike:
            # torch.utils.swap_tensors() refuses parameters of which there are weak references.
            self.tensors: list[Callable[[], Any]] = [lambda: parameter]
            self.tensors += [weakref.ref(tensor) for tensor in tensors[1:]]
            weights, *state = addresses = [tensor.data_ptr() for tensor in tensors]
            self._kept = [*zip(("", *names), self.tensors, addresses, strict=True)]
            steps = [state.pop() if "step" in names else 0]
            lacking = [0] * (3 - len(state))
            double = parameter.dtype is torch.float64
            self.places = [weights, *state, *lacking, *steps, parameter.numel(), number, double]

    def is_still(
        self, parameter: torch.Tensor, number: int, names: Sequence[str], entry: Mapping[str, Any]
    ) -> bool:
        """Return whether nothing has changed since the row was made."""
        if not self._alike or number != self._number or names != self._names:
            return False
        for name, kept, address in self._kept:
            tensor = kept()
            if tensor is None or tensor.data_ptr() != address:
                return False
            if (entry.get(name) if name else parameter) is not tensor:
                return False
        return (parameter.nbytes, parameter.stride()) == self._form[1:]

    def address_of(self, gradient: torch.Tensor) -> int:
        """Return 1 for no elements, and 0 where torch must step."""
        if not self._alike or not _is_plain(gradient, *self._form):
            return 0
        return gradient.data_ptr() or int(not self.places[5])


def _is_plain(tensor: Any, dtype: torch.dtype, nbytes: int, strides: tuple[int, ...]) -> bool:
    return (
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and tensor.dtype is dtype
        and tensor.nbytes == nbytes
        and tensor.stride() == strides
        and not tensor.is_neg()
    )


def _is_torchs_own(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether nothing else happens in step() than in torch's own."""
    # That of broadcast_parameters() does nothing for wrapped optimizers.
    after = torch_optimizer._global_optimizer_post_hooks.values()
    others = any(getattr(hook, "__module__", None) != watched_models.__name__ for hook in after)
    own = optimizer.__dict__
    if optimizer.defaults.get("differentiable"):
        return False
    if others or torch_optimizer._global_optimizer_pre_hooks:
        return False
    if own.get("_optimizer_step_pre_hooks") or own.get("_optimizer_step_post_hooks"):
        return False
    step: Callable[..., Any] | None = own.get("step", type(optimizer).step)
    # A scheduler sets a function that counts steps, and calls what was there.
    while step is not None:
        function = getattr(step, "__func__", step)
        if not getattr(function, "__globals__", {}).get("__name__", "").startswith("torch.optim."):
            return False
        step = getattr(function, "__wrapped__", None)
    return True
