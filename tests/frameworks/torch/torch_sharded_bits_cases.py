"""Optimizer steps whose work the ranks of a node share: bits of those that each takes in full."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch_sharded_cases import equal_on_all_ranks, state_difference, wrapped
from torch_training import Model, difference, drawn, gradients_of, own

import hvdtrain.torch as hvd
from hvdtrain.core.sharding.exchange import ShardedExchange
from hvdtrain.engines.communicator import Slices
from hvdtrain.torch.kernel_step import find_form
from hvdtrain.train.optimizers.layerwise import Lamb, Lars

MAKES: dict[type[torch.optim.Optimizer], list[dict[str, Any]]] = {
    torch.optim.SGD: [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
        {"momentum": 0.9, "weight_decay": 0.1, "dampening": 0.2, "maximize": True},
    ],
    torch.optim.Adam: [{}, {"weight_decay": 0.1, "amsgrad": True, "maximize": True}],
    torch.optim.AdamW: [{"betas": (0.4, 0.9)}, {"weight_decay": 0.1, "amsgrad": True}],
}
STEPS = 4
Step = Callable[[hvd.DistributedOptimizer, list[torch.nn.Parameter], int], None]


def build_odd(dtype: torch.dtype) -> Model:
    torch.manual_seed(5)
    layers = [torch.nn.Linear(7, 131), torch.nn.Tanh(), torch.nn.Linear(131, 33)]
    spare = torch.nn.Linear(5, 3)  # which no rank uses
    return Model(*layers, torch.nn.Tanh(), torch.nn.Linear(33, 1), spare).to(dtype)


def kinds() -> Iterator[Callable[[Model], torch.optim.Optimizer]]:
    for kind, all_settings in MAKES.items():
        for settings in all_settings:

            def make(model: Model, kind: Any = kind, settings: Any = settings) -> Any:
                large = [p for p in model.parameters() if p.ndim > 1]
                small = [p for p in model.parameters() if p.ndim == 1]
                groups = [{"params": large}, {"params": small, "lr": 0.03, "weight_decay": 0.0}]
                return kind(groups, lr=0.01, fused=True, **settings)

            yield make


def trained(
    make: Callable[[Model], torch.optim.Optimizer],
    dtype: torch.dtype,
    sharded: bool,
    step_of: Step,
    passes: int = 1,
) -> tuple[list[torch.Tensor], dict[str, Any], bool]:
    model = build_odd(dtype)
    optimizer = wrapped(
        lambda _: make(model), model, sharded=sharded, backward_passes_per_step=passes
    )
    parameters = list(model.parameters())
    first = 0 if "momentum" in optimizer.param_groups[0] else 2
    for step in range(STEPS):
        optimizer.sample_weight = 3.0 + hvd.rank()
        optimizer.zero_grad()
        for part in range(passes):
            inputs = own(drawn(10 * step + part, 4 * hvd.size(), 7)).to(dtype)
            loss = model[:5](inputs).square().mean()
            # From some step on rank 0 uses a parameter that no other does. Fused SGD of torch does
            # not take parameters with and without momentum together.
            if hvd.rank() == 0 and step >= first:
                loss = loss + parameters[4].sum() * 0.1
            loss.backward()
        step_of(optimizer, parameters, step)
    assert equal_on_all_ranks(model)
    weights = [p.detach().clone() for p in parameters]
    return weights, optimizer.state_dict()["state"], takes_kernel(optimizer)


def takes_kernel(optimizer: hvd.DistributedOptimizer) -> bool:
    """Return whether sums are left to steps with the kernel: it has to, where it can."""
    exchange = gradients_of(optimizer).buckets.exchange
    if not isinstance(exchange, ShardedExchange):
        return False
    kind: type = type(optimizer._optimizer)
    slices, form = exchange.slices, find_form(kind)
    alone = isinstance(slices, Slices) and slices.in_tree and slices.nodes == 1
    assert ("deferred" in exchange.spec) == (alone and form is not None)
    return alone and form is not None


def step_plainly(
    optimizer: hvd.DistributedOptimizer, parameters: list[torch.nn.Parameter], step: int
) -> None:
    optimizer.step()


def step_after_changes(
    optimizer: hvd.DistributedOptimizer, parameters: list[torch.nn.Parameter], step: int
) -> None:
    """Step on gradients that the program has changed, with weights that it has moved."""
    if step == 1:
        parameters[0].data = parameters[0].data.clone() * 0.5
    optimizer.synchronize()
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)
    gradient = parameters[2].grad
    if step > 1 and gradient is not None:
        parameters[2].grad = gradient * 2.0
        parameters[1].grad = None
    with optimizer.skip_synchronize():
        optimizer.step()


def same_bits(
    make: Callable[[Model], torch.optim.Optimizer],
    dtype: torch.dtype,
    step_of: Step,
    passes: int = 1,
) -> bool:
    """Check that a model is the same with shared steps, and with whole ones.

    It is to the last bit if the kernel takes the steps, which is returned.
    """
    weights, state, fused = trained(make, dtype, True, step_of, passes)
    others, expected, _ = trained(make, dtype, False, step_of, passes)
    bound = 0.0 if fused else 1e-4 if dtype is torch.float32 else 1e-12
    assert all(largest(a - b) <= bound for a, b in zip(weights, others, strict=True))
    assert state.keys() == expected.keys()
    for key, entry in expected.items():
        for name, value in entry.items():
            assert value is None or largest(state[key][name] - value) <= bound, (key, name)
    return fused


def largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max())


def shared_steps_have_the_bits_of_fused_ones() -> None:
    for make in kinds():
        for dtype in (torch.float32, torch.float64):
            same_bits(make, dtype, step_plainly)


def shared_steps_on_changed_gradients_have_these_bits() -> None:
    for make in kinds():
        same_bits(make, torch.float32, step_after_changes)
    for make in list(kinds())[1::3]:
        same_bits(make, torch.float32, step_plainly, passes=2)


def with_whole_parameters(
    dtype: torch.dtype, sharded: bool, kind: Any
) -> tuple[Model, hvd.DistributedOptimizer]:
    """Train a model's matrices with one optimizer, and the rest with Adam that ranks share."""
    model = build_odd(dtype)
    large = {name: p for name, p in model.named_parameters() if p.ndim > 1}
    small = [p for p in model.parameters() if p.ndim == 1]
    others = optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(small, lr=0.01), sharded=True)
    for step in range(STEPS):
        if step in (0, 2):  # from a saved state
            state = optimizer.state_dict() if step else None
            optimizer = wrapped(lambda _: kind(large.values(), lr=0.1), model, sharded=sharded)
            if state is not None:
                optimizer.load_state_dict(state)
        others.sample_weight = optimizer.sample_weight = 3.0 + hvd.rank()
        loss = model[:5](own(drawn(step, 4 * hvd.size(), 7)).to(dtype)).square().mean()
        if hvd.rank() == 0 and step:  # which no other rank uses
            loss = loss + large["5.weight"].sum() * 0.1
        scaler = torch.amp.GradScaler(loss.device.type, 8.0, enabled=step == 1)
        scaler.scale(loss).backward()
        if step in (1, 2):  # gradients are the program's
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(large.values(), 0.01)
        if step == 3:
            optimizer.clip_grad_norm_(0.01)
        with optimizer.skip_synchronize() if step in (1, 2) else nullcontext():
            scaler.step(optimizer)
        others.zero_grad() if scaler.is_enabled() else others.step()
        optimizer.zero_grad()
    return model, optimizer


def whole_parameters_are_shared_with_the_same_bits() -> None:
    for kind in (torch.optim.Muon, Lars, Lamb):
        for dtype in (torch.float32, torch.float64):
            model, optimizer = with_whole_parameters(dtype, True, kind)
            whole, reference = with_whole_parameters(dtype, False, kind)
            assert equal_on_all_ranks(model)
            assert difference(model, whole) == 0.0
            assert state_difference(optimizer.state_dict(), reference.state_dict()) == 0.0
