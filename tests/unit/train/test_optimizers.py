"""LARS and LAMB against their formulas in numpy, and the choice of an optimizer by its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from hvdtrain.train.optimizers.layerwise import Lamb, Lars, torch_optimizer

Array = npt.NDArray[np.float64]
Parameters = list[torch.nn.Parameter]

SHAPES = [(5, 3), (5,), (2, 3, 2), (), (4, 4)]
LR = 0.1


def arrays(seed: int) -> list[Array]:
    """Return one array of each shape; the last one is zero."""
    generator = np.random.default_rng(seed)
    return [generator.standard_normal(shape) * (i < 4) for i, shape in enumerate(SHAPES)]


def parameters(dtype: torch.dtype = torch.float64) -> Parameters:
    return [torch.nn.Parameter(torch.from_numpy(np.array(a)).to(dtype)) for a in arrays(0)]


def steps(
    optimizer: torch.optim.Optimizer, chosen: Parameters, numbers: Sequence[int], scale: float = 1
) -> None:
    """Take steps whose gradients depend on their numbers; the last parameter has none in step 2."""
    for number in numbers:
        for parameter, gradient in zip(chosen, arrays(number), strict=True):
            full = torch.full_like(parameter, 0.3 * number) if not gradient.any() else None
            own = torch.from_numpy(np.array(gradient)) if full is None else full
            parameter.grad = (own * scale).to(parameter.dtype)
        if number == 2:
            chosen[-1].grad = None
        optimizer.step()


def gradients(number: int) -> list[Array | None]:
    """Return what steps() gives the parameters."""
    full = np.full(SHAPES[-1], 0.3 * number) if number != 2 else None
    return [*arrays(number)[:-1], full]


def ratio(weights: Array, other: Array, value: Callable[[float, float], float]) -> float:
    of_weights, of_other = float(np.linalg.norm(weights)), float(np.linalg.norm(other))
    return value(of_weights, of_other) if of_weights > 0 and of_other > 0 else 1.0


def lars_by_formula(numbers: Sequence[int], decay: float, coefficient: float) -> list[Array]:
    weights, velocities = arrays(0), [np.zeros(shape) for shape in SHAPES]
    for number in numbers:
        for i, g in enumerate(gradients(number)):
            if g is None:
                continue
            w, scaled = weights[i], g
            if w.ndim > 1:
                trust = ratio(w, g, lambda a, b: coefficient * a / (b + decay * a))
                scaled = trust * (g + decay * w)
            velocities[i] = 0.9 * velocities[i] + LR * scaled
            weights[i] = w - velocities[i]
    return weights


def lamb_by_formula(numbers: Sequence[int], decay: float, eps: float) -> list[Array]:
    weights = arrays(0)
    m, s = ([np.zeros(shape) for shape in SHAPES] for _ in range(2))
    taken = [0] * len(SHAPES)
    for number in numbers:
        for i, g in enumerate(gradients(number)):
            if g is None:
                continue
            w, taken[i] = weights[i], taken[i] + 1
            m[i] = 0.9 * m[i] + 0.1 * g
            s[i] = 0.999 * s[i] + 0.001 * g * g
            u = m[i] / (1 - 0.9 ** taken[i]) / (np.sqrt(s[i] / (1 - 0.999 ** taken[i])) + eps)
            trust = 1.0
            if w.ndim > 1:
                u = u + decay * w
                trust = ratio(w, u, lambda a, b: a / b)
            weights[i] = w - LR * trust * u
    return weights


def difference(chosen: Parameters, expected: list[Array]) -> float:
    pairs = zip(chosen, expected, strict=True)
    return max(float(np.abs(p.detach().double().numpy() - w).max()) for p, w in pairs)


@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_several_steps_follow_the_formula(decay: float) -> None:
    numbers, chosen = range(1, 6), parameters()
    steps(Lars(chosen, LR, 0.9, decay, trust_coefficient=0.02), chosen, numbers)
    assert difference(chosen, lars_by_formula(numbers, decay, 0.02)) < 1e-13
    chosen = parameters()
    steps(Lamb(chosen, LR, eps=1e-6, weight_decay=decay), chosen, numbers)
    assert difference(chosen, lamb_by_formula(numbers, decay, 1e-6)) < 1e-12


def test_the_step_of_lars_has_the_length_of_the_weights_whatever_the_gradient() -> None:
    for scale in (1.0, 1e-5, 1e7):
        chosen = parameters()
        before = [parameter.detach().clone() for parameter in chosen]
        steps(Lars(chosen, LR, momentum=0), chosen, [1], scale)
        for parameter, old in list(zip(chosen, before, strict=True))[:-1]:
            if parameter.ndim > 1:
                moved = (parameter.detach() - old).norm()
                torch.testing.assert_close(moved, LR * 0.001 * old.norm())


def test_the_step_of_lamb_has_the_length_of_the_weights() -> None:
    chosen = parameters()
    before = [parameter.detach().clone() for parameter in chosen]
    steps(Lamb(chosen, LR), chosen, [1])
    for parameter, old in list(zip(chosen, before, strict=True))[:-1]:
        if parameter.ndim > 1:
            torch.testing.assert_close((parameter.detach() - old).norm(), LR * old.norm())


@pytest.mark.parametrize(
    ("layerwise", "plain"),
    [
        (lambda p: Lars(p, LR, weight_decay=0.5), lambda p: torch.optim.SGD(p, LR, momentum=0.9)),
        (lambda p: Lamb(p, LR, weight_decay=0.5), lambda p: torch.optim.Adam(p, LR, eps=1e-6)),
    ],
)
def test_biases_take_plain_steps_and_zero_weights_a_plain_first_one(
    layerwise: Callable[[Parameters], Any], plain: Callable[[Parameters], Any]
) -> None:
    ours, theirs = parameters(), parameters()
    steps(layerwise(ours), ours, [1])
    steps(plain(theirs), theirs, [1])
    torch.testing.assert_close(ours[-1], theirs[-1], rtol=1e-12, atol=0)
    ours, theirs = parameters(), parameters()
    steps(layerwise(ours), ours, range(1, 6))
    steps(plain(theirs), theirs, range(1, 6))
    for mine, expected in zip(ours, theirs, strict=True):
        if mine.ndim <= 1:
            torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-14)
        else:
            assert not torch.allclose(mine, expected)


@pytest.mark.parametrize(
    "make", [lambda p: Lars(p, LR, weight_decay=0.1), lambda p: Lamb(p, LR, weight_decay=0.1)]
)
def test_state_goes_through_a_checkpoint(make: Callable[[Parameters], Any]) -> None:
    whole, first = parameters(), parameters()
    steps(make(whole), whole, range(1, 6))
    before = make(first)
    steps(before, first, range(1, 4))
    second = [torch.nn.Parameter(parameter.detach().clone()) for parameter in first]
    after = make(second)
    after.load_state_dict(before.state_dict())
    steps(after, second, range(4, 6))
    assert all(torch.equal(a, b) for a, b in zip(whole, second, strict=True))


def test_norms_of_half_types_do_not_overflow() -> None:
    for make in (lambda p: Lars(p, 100 * LR, momentum=0), lambda p: Lamb(p, LR)):
        weights = torch.nn.Parameter(torch.full((300, 300), 300.0, dtype=torch.float16))
        weights.grad = torch.full_like(weights, 300.0)  # their norms are 90000
        make([weights]).step()
        assert weights.isfinite().all()
        assert (weights < 300).all()


def test_bad_arguments_and_sparse_gradients_are_refused() -> None:
    with pytest.raises(ValueError, match="Lars: momentum must be 0 or more, got -1"):
        Lars(parameters(), LR, momentum=-1)
    with pytest.raises(ValueError, match="Lamb: betas must be"):
        Lamb(parameters(), LR, betas=(1.0, 0.9))
    with pytest.raises(ValueError, match="Lamb: lr must be 0 or more, got nan"):
        Lamb(parameters(), float("nan"))
    embedding = torch.nn.Embedding(3, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="do not take sparse gradients"):
        Lars(embedding.parameters(), LR).step()


def test_half_types_are_stepped_as_by_the_formula() -> None:
    """In torch's fused form they are not, on the CPU."""
    (weight,) = halves = [torch.nn.Parameter(torch.full((64,), 2.0).bfloat16())]
    optimizer = torch_optimizer(Options("sgd", momentum=0.0), halves, 0.5)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert weight.tolist() == [1.5] * 64


@dataclass(frozen=True)
class Options:
    optimizer: str
    momentum: float = 0.7
    weight_decay: float | None = None
    clip_norm: float | None = None


@pytest.mark.parametrize(
    ("name", "kind", "settings"),
    [
        ("sgd", torch.optim.SGD, {"momentum": 0.7, "weight_decay": 0.0}),
        ("adam", torch.optim.Adam, {"eps": 1e-8, "weight_decay": 0.0}),
        ("adamw", torch.optim.AdamW, {"weight_decay": 0.01}),
        ("lars", Lars, {"momentum": 0.7, "weight_decay": 0.0, "trust_coefficient": 0.001}),
        ("lamb", Lamb, {"betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.0}),
    ],
)
def test_an_optimizer_by_its_name(name: str, kind: type, settings: dict[str, Any]) -> None:
    made = torch_optimizer(Options(name), parameters(), 0.25)
    assert type(made) is kind
    group = made.param_groups[0]
    assert {key: group[key] for key in settings} == settings
    assert group["lr"] == 0.25
    asked = torch_optimizer(Options(name, weight_decay=0.2), parameters(), 0.25)
    assert asked.param_groups[0]["weight_decay"] == 0.2
