"""Default steps of torch's optimizers in the compiled kernel have torch's bits, or are torch's."""

import copy
import math
import random
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW
from torch.optim import optimizer as torch_optimizer
from torch.optim.lr_scheduler import StepLR

from hvdtrain.core.update_kernel import Form, KernelStep
from hvdtrain.torch.kernel_step import KernelSteps, kernel_rule

ODD = (float("nan"), float("inf"), -0.0, 1e-42, -1e-310, 1e30)
SHAPES = ((), (0,), (1,), (7,), (511,), (4097,), (33, 70), (4, 3, 5, 5), (200_001,))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Twins:
    """An optimizer whose steps the kernel takes, and an equal one whose steps torch takes."""

    def __init__(self, kind: Any, *groups: dict[str, Any], seed: int = 0) -> None:
        self.draws, self.taken = random.Random(seed), 0
        self.generator = torch.Generator().manual_seed(seed)
        parameters = [
            {"params": [torch.nn.Parameter(self.drawn(*each)) for each in g.pop("shapes")], **g}
            for g in groups
        ]
        self.own, self.torchs = (kind(copy.deepcopy(parameters)) for _ in range(2))
        self.steps = KernelSteps(self.own)

    def drawn(self, shape: tuple[int, ...], dtype: torch.dtype, order: str = "C") -> torch.Tensor:
        numbers = torch.randn(2, *shape, generator=self.generator, dtype=dtype)
        tensor = numbers[0] * torch.exp(4 * numbers[1])
        if tensor.numel() and self.draws.random() < 0.2:
            tensor.view(-1)[self.draws.randrange(tensor.numel())] = self.draws.choice(ODD)
        if order == "F" and len(shape) == 2:
            return tensor.t().contiguous().t()
        if order == "F" and len(shape) == 4:
            return tensor.contiguous(memory_format=torch.channels_last)
        return tensor

    def pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for own, other in zip(self.own.param_groups, self.torchs.param_groups, strict=True):
            yield from zip(own["params"], other["params"], strict=True)

    def step(self, without: float = 0.1) -> None:
        for own, other in self.pairs():
            own.grad = other.grad = None
            if self.draws.random() >= without:
                gradient = self.drawn(tuple(own.shape), own.dtype)
                flat, count = gradient.view(-1), own.numel()
                flat[: count // 2 : 3] = flat[count // 2 : count * 2 // 3] = 0  # of inactive units
                flat[: count // 5] *= 1e-21  # with subnormal squares
                own.grad, other.grad = (torch.empty_like(own).copy_(gradient) for _ in range(2))
        self.torchs.step()
        if self.steps.take():
            self.taken += 1
        else:
            self.own.step()
        self.compare()

    def compare(self) -> None:
        for own, other in self.pairs():
            torch.testing.assert_close(own, other, rtol=0, atol=0, equal_nan=True)
            entry, expected = dict(self.own.state[own]), dict(self.torchs.state[other])
            torch.testing.assert_close(entry, expected, rtol=0, atol=0, equal_nan=True)


def settings(draws: random.Random, kind: type) -> dict[str, Any]:
    rate, decay = draws.choice((0.1, 1e-3, 1, 3e-4)), draws.choice((0, 0.01, 0.1))
    found = {"lr": rate, "weight_decay": decay, "maximize": draws.random() < 0.2}
    if kind is SGD:
        momentum = draws.choice((0, 0.5, 0.9))
        nesterov = momentum > 0 and draws.random() < 0.4
        dampening = 0 if nesterov else draws.choice((0, 0.1))
        return {**found, "momentum": momentum, "nesterov": nesterov, "dampening": dampening}
    betas = draws.choice(((0.9, 0.999), (0.4, 0.9), (0.5, 0.5), (0.0, 0.99)))
    amsgrad = draws.random() < 0.3
    return {**found, "betas": betas, "eps": draws.choice((1e-8, 1e-3)), "amsgrad": amsgrad}


@pytest.mark.parametrize(("kind", "threads"), [(SGD, 3), (Adam, 1), (AdamW, 2)])
def test_every_bit_of_weights_and_state_is_that_of_torch(kind: type, threads: int) -> None:
    torch.set_num_threads(threads)
    taken = 0
    for seed in range(20):
        draws = random.Random(seed)
        types = (torch.float32, torch.float32, torch.float64)
        groups = [
            {"shapes": [[*map(draws.choice, (SHAPES, types, "CF"))] for _ in range(count)]}
            | settings(draws, kind)
            for count in draws.choices(range(1, 5), k=draws.randint(1, 3))
        ]
        twins = Twins(kind, *groups, seed=seed)
        for _ in range(5):
            twins.step()
            for optimizer in (twins.own, twins.torchs):
                optimizer.param_groups[0]["lr"] *= 0.7
        taken += twins.taken
    assert taken > 50  # the first step of a parameter is torch's


PLAIN = {"shapes": [((5, 3), torch.float32), ((4,), torch.float32)], "lr": 0.1}


def use_a_step_of_its_own(optimizer: Any) -> None:
    torchs = optimizer.step

    def step() -> None:
        optimizer.param_groups[0]["params"][0].grad.mul_(2)
        torchs()

    optimizer.step = step


def move_parameters(optimizer: Any) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.data = parameter.data.clone()


# Whether the kernel takes the next step.
CHANGES: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "hook": (lambda optimizer: optimizer.register_step_post_hook(lambda *_: None), False),
    "step": (use_a_step_of_its_own, False),
    "rate": (lambda optimizer: optimizer.param_groups[0].update(lr=torch.tensor(0.05)), False),
    "lists": (lambda optimizer: optimizer.param_groups[0].update(foreach=True), False),
    "moved": (move_parameters, True),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", [SGD, Adam])
def test_a_program_may_change_what_it_likes_between_steps(kind: type, change: str) -> None:
    twins, (make, taken) = Twins(kind, dict(PLAIN)), CHANGES[change]
    for _ in range(3):
        twins.step(without=0)
    before = twins.taken
    assert before > 0
    make(twins.own)
    make(twins.torchs)
    twins.step(without=0)
    assert twins.taken == before + taken


def test_state_is_replaced_and_parameters_are_added() -> None:
    twins = Twins(Adam, dict(PLAIN), {"shapes": [((6,), torch.float64)], "amsgrad": True})
    for _ in range(3):
        twins.step(without=0)
    for optimizer in (twins.own, twins.torchs):
        optimizer.load_state_dict(optimizer.state_dict())
        for entry in optimizer.state.values():
            entry["exp_avg"].mul_(0.5)
            entry["exp_avg_sq"] = entry["exp_avg_sq"] + 1
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(9))]})
    taken = twins.taken
    for _ in range(3):
        twins.step(without=0)
    assert twins.taken == taken + 2  # a first step for the new parameter
    for optimizer in (twins.own, twins.torchs):
        del optimizer.param_groups[0]
    twins.step(without=0)
    assert twins.taken == taken + 3


def test_schedulers_profilers_and_graphs_see_the_step() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = SGD([parameter], lr=0.1, momentum=0.9)
    steps = KernelSteps(optimizer)
    for taken in (False, True):
        loss = (parameter**2).sum()
        loss.backward(retain_graph=True)
        assert steps.take() is taken
        optimizer.step()
    scheduler = StepLR(optimizer, 1)
    assert not hasattr(optimizer, "_opt_called")  # torch would warn of scheduler.step() first
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert steps.take()
    assert "Optimizer.step#SGD.step" in {event.key for event in profile.key_averages()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_hooks_of_all_optimizers_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    twins, seen = Twins(SGD, dict(PLAIN)), []
    hooks = torch_optimizer._global_optimizer_post_hooks
    monkeypatch.setitem(hooks, -1, lambda optimizer, *_: seen.append(optimizer))
    twins.step(without=0)
    assert seen == [twins.torchs, twins.own]
    assert twins.taken == 0


def test_subnormal_numbers_are_flushed_where_the_program_wants_it() -> None:
    twins = Twins(SGD, {"shapes": [((9,), torch.float32)], "lr": 1e-42})
    flushes = torch.set_flush_denormal(True)  # if the processor can
    try:
        twins.step(without=0)
    finally:
        torch.set_flush_denormal(False)
    assert not (flushes and twins.taken)


@pytest.mark.parametrize(
    "change",
    [
        lambda optimizer, p: setattr(p, "data", p.data[:2]),
        lambda optimizer, p: setattr(p, "grad", torch._efficientzerotensor(4)),
        lambda optimizer, p: setattr(p, "grad", p.detach()),
        lambda optimizer, p: setattr(p, "grad", torch.ones(4).to_sparse()),
        lambda optimizer, p: optimizer.param_groups[0]["params"].append(p),
        lambda optimizer, p: optimizer.param_groups[0].update(betas=(1.0, 0.9)),
        lambda optimizer, p: optimizer.state[p].update(exp_avg=torch.zeros(1)),
        lambda optimizer, p: optimizer.defaults.update(differentiable=True),
        lambda optimizer, p: setattr(optimizer, "__class__", type("Own", (Adam,), {})),
    ],
)
def test_torch_takes_steps_that_it_refuses_or_takes_in_another_order(change: Any) -> None:
    twins = Twins(Adam, {"shapes": [((4,), torch.float32)]})
    for _ in range(2):
        twins.step(without=0)
    change(twins.own, twins.own.param_groups[0]["params"][0])
    assert twins.taken
    assert not twins.steps.take()


def test_steps_need_no_threads_and_keep_no_state() -> None:
    torch.set_num_threads(2)
    twins = Twins(Adam, {"shapes": [((200_001,), torch.float64)]})
    for _ in range(2):
        twins.step(without=0)
    twins.steps._steps._others.shutdown()  # type: ignore[union-attr]  # as where the main thread ends
    twins.step(without=0)
    assert twins.taken == 2
    kept = [weakref.ref(each) for entry in twins.own.state.values() for each in entry.values()]
    twins.own.state.clear()
    assert not any(each() is not None for each in kept)
    assert not twins.steps.take()


def test_corrections_are_computed_as_in_python_without_roots_of_mkl() -> None:
    group = Adam([torch.ones(1)], lr=1, betas=(0.0, 0.9)).param_groups[0]
    (rule,) = filter(None, [kernel_rule(Adam, group, fused=False)])
    unlike = [n for n in range(1, 999) if (1 - 0.9**n) ** 0.5 != math.sqrt(1 - 0.9**n)]
    weights, mean, square = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64).split(1)
    steps, gradient = torch.tensor(unlike[0] - 1.0), torch.ones(1, dtype=torch.float64)
    addresses, state = [[weights.data_ptr()]], [mean.data_ptr(), square.data_ptr(), 0]
    form = Form(contracts=True, width_bytes=0)
    step = KernelStep(addresses, form, state=state, steps=steps.data_ptr(), count=1, is_double=True)
    step.gradients[:] = gradient.data_ptr()
    step.update([rule])
    correction = (1 - 0.9 ** unlike[0]) ** 0.5
    assert weights.item() == -mean.item() / (math.sqrt(square.item()) / correction + 1e-8)
