"""LARS and LAMB against their formulas in numpy, and the choice of an optimizer by its name."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from hvdtrain.errors import UsageError
from hvdtrain.topology import Topology
from hvdtrain.train.loop.step_plan import StepPlan
from hvdtrain.train.metrics import Accuracy, ConfusionMatrix, MeanOf, Metric, TopK
from hvdtrain.train.optimizers.layerwise import Lamb, Lars
from hvdtrain.train.options import TrainOptions, parse_milestones
from hvdtrain.train.recipe import Recipe
from hvdtrain.train.torch.update import plain_optimizer

Array = npt.NDArray[np.float64]
Parameters = list[torch.nn.Parameter]

SHAPES = [(5, 3), (5,), (2, 3, 2), (), (4, 4)]
LR = 0.1


def arrays(seed: int) -> list[Array]:
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


@pytest.mark.parametrize("kind", [Lars, Lamb])
def test_state_goes_through_a_checkpoint(kind: Any) -> None:
    whole, first = parameters(), parameters()
    steps(kind(whole, LR, weight_decay=0.1), whole, range(1, 6))
    before = kind(first, LR, weight_decay=0.1)
    steps(before, first, range(1, 4))
    second = [torch.nn.Parameter(parameter.detach().clone()) for parameter in first]
    after = kind(second, LR, weight_decay=0.1)
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
    weight = torch.nn.Parameter(torch.full((64,), 2.0).bfloat16())
    options = TrainOptions(lr=0.5, momentum=0.0)
    optimizer = plain_optimizer(
        Recipe(None, None, print), torch.nn.ParameterList([weight]), options
    )
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert weight.tolist() == [1.5] * 64


def rates(samples: int = 10, size: int = 4, **options: Any) -> list[float]:
    """Return the rates of a run on ranks with one sample each in a step, or of one rank."""
    given = {"lr": 0.1, "epochs": 4, "warmup_epochs": 0.0, "global_batch_size": 1, **options}
    topology = Topology.from_nodes(0, [0] * size, ["a"] * size)
    plan = StepPlan(TrainOptions(**given), topology, samples)
    return [plan.lr(step) for step in range(plan.steps)]


@pytest.mark.parametrize("size", [2, 3, 8])
def test_warmup_is_horovods(size: int) -> None:
    steps, epochs, base = 7, 3, 0.05
    found = iter(rates(steps, size, lr=base, epochs=epochs, warmup_epochs=float(epochs)))
    for epoch in range(epochs):
        for step in range(steps):
            x = epoch + step / steps + 1 / steps
            expected = base * (x * (size - 1) / epochs + 1)
            assert next(found) == pytest.approx(expected)


def of_torch(make: Callable[[torch.optim.Optimizer], Any], steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    scheduler, found = make(optimizer), []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_decays_are_those_of_torch() -> None:
    schedulers = torch.optim.lr_scheduler
    expected = of_torch(lambda o: schedulers.CosineAnnealingLR(o, 39, eta_min=0.01), 40)
    assert rates(schedule="cosine", final_lr=0.01) == pytest.approx(expected, rel=1e-10)
    expected = of_torch(lambda o: schedulers.PolynomialLR(o, 39, power=2), 40)
    assert rates(schedule="polynomial", power=2) == pytest.approx(expected, rel=1e-10, abs=1e-15)
    expected = of_torch(lambda o: schedulers.MultiStepLR(o, [15, 30], gamma=0.2), 40)
    got = rates(schedule="step", milestones="1.5,3", decay=0.2)
    assert got == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("schedule", "more"), [("cosine", {}), ("polynomial", {"power": 0.9})])
def test_the_decay_begins_where_the_warmup_ends(schedule: str, more: dict[str, Any]) -> None:
    got = rates(schedule=schedule, warmup_epochs=1.5, final_lr=0.02, **more)
    assert got[:15] == rates(warmup_epochs=1.5)[:15]
    assert got[14] == 0.4
    assert got[15] < 0.4
    assert got[-1] == 0.02
    middle = 14 + 25 / 2  # half of the decay's 25 steps lies between two of them
    around = (got[math.floor(middle)] + got[math.ceil(middle)]) / 2
    power = 0.5 ** more.get("power", 1.0)
    assert around == pytest.approx(0.02 + 0.38 * power, abs=1e-3)


def test_a_run_that_is_all_warmup_does_not_decay() -> None:
    for schedule, milestones in (("step", "3"), ("cosine", ""), ("polynomial", "")):
        decays: dict[str, Any] = {"schedule": schedule, "milestones": milestones}
        assert rates(warmup_epochs=5.0, **decays) == rates(warmup_epochs=5.0)
        assert rates(1, epochs=1, **decays) == [0.4]


def test_milestones_are_epochs_of_the_run_and_the_warmup_goes_first() -> None:
    got = rates(schedule="step", warmup_epochs=2.0, milestones="1,3")
    assert got[:19] == rates(warmup_epochs=2.0)[:19]
    assert got[19:] == pytest.approx([0.04] * 11 + [0.004] * 10)


def test_milestones_as_people_write_them() -> None:
    assert parse_milestones("30, 60,80.5") == (30.0, 60.0, 80.5)
    assert parse_milestones("") == ()
    for text in ("30,20", "30,30", "0", "-1", "30,,60", "thirty", "inf", "1,nan"):
        with pytest.raises(UsageError, match=r"--milestones must be ascending epochs.*30,60,80"):
            parse_milestones(text)


SCORES = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.1, 0.4], [0.2, 0.3, 0.5], [0.9, 0.0, 0.1]])
TARGETS = torch.tensor([1, 2, 0, 0])


def distance(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(dim=1) - targets).abs()


ADDING: list[Metric] = [Accuracy(), TopK(2), ConfusionMatrix(3), MeanOf(distance)]


def value(metric: Metric, *parts: tuple[torch.Tensor, torch.Tensor]) -> Any:
    counts = torch.stack([metric.counts(*part) for part in parts])
    assert counts.dtype == torch.float64
    return metric.value(counts.sum(dim=0).numpy())


def test_values_by_hand() -> None:
    assert value(Accuracy(), (SCORES, TARGETS)) == 0.5
    assert value(TopK(1), (SCORES, TARGETS)) == 0.5
    assert value(TopK(2), (SCORES, TARGETS)) == 0.75
    assert value(ConfusionMatrix(3), (SCORES, TARGETS)) == [[1, 0, 1], [0, 1, 0], [1, 0, 0]]
    assert value(MeanOf(distance), (SCORES, TARGETS)) == 1.0


def test_sequences_and_maps_have_a_target_at_each_place() -> None:
    outputs, targets = SCORES.T.unsqueeze(0), TARGETS.unsqueeze(0)  # [1, classes, 4], [1, 4]
    for metric in ADDING[:3]:
        assert value(metric, (outputs, targets)) == value(metric, (SCORES, TARGETS))


def test_equal_scores_are_no_hits_but_for_the_first() -> None:
    targets = torch.arange(10)
    for k in (1, 3):
        assert value(TopK(k), (torch.zeros(10, 10), targets)) == k / 10
        assert value(TopK(k), (torch.full((10, 10), math.nan), targets)) == 0


def test_no_samples_have_no_mean() -> None:
    nothing = (SCORES[:0], TARGETS[:0])
    for metric in (Accuracy(), TopK(2), MeanOf(distance)):
        assert math.isnan(value(metric, nothing))
    assert value(ConfusionMatrix(3), nothing) == [[0] * 3] * 3


def test_bad_use_is_refused() -> None:
    with pytest.raises(UsageError, match=r"TopK\(3\) of 3 classes: all would be hits"):
        TopK(3).counts(SCORES, TARGETS)
    with pytest.raises(UsageError, match="k must be at least 1, got 0"):
        TopK(0)
    with pytest.raises(UsageError, match="classes must be at least 1, got 0"):
        ConfusionMatrix(0)
    with pytest.raises(UsageError, match=r"ConfusionMatrix\(4\): the model gives 3 scores"):
        ConfusionMatrix(4).counts(SCORES, TARGETS)
    with pytest.raises(UsageError, match="targets from 0 to 3, expected 0 to 2"):
        ConfusionMatrix(3).counts(SCORES, torch.tensor([0, 1, 2, 3]))
    with pytest.raises(UsageError, match=r"each of 4 samples, got shape \(\)"):
        MeanOf(lambda outputs, targets: outputs.mean()).counts(SCORES, TARGETS)
