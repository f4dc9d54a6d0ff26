"""Learning rates against worked numbers and against Horovod's formula."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.errors import UsageError
from hvdtrain.train.optimizers.schedule import (
    SCHEDULES,
    ScheduleSettings,
    learning_rate,
    parse_milestones,
    scaled_lr,
    warmup_lr,
)


def test_scaling() -> None:
    assert scaled_lr(0.1, 4, "linear") == pytest.approx(0.4)
    assert scaled_lr(0.1, 4, "sqrt") == pytest.approx(0.2)
    assert scaled_lr(0.1, 4, "none") == 0.1
    assert [scaled_lr(0.1, 1, scaling) for scaling in ("linear", "sqrt", "none")] == [0.1] * 3


def test_warmup_of_four_ranks() -> None:
    """Four ranks, ten steps an epoch, five epochs, 0.4 in the end."""
    rates = [warmup_lr(step, 10, 0.1, 0.4, 5) for step in range(60)]
    assert rates[0] == pytest.approx(0.106, abs=1e-15)
    assert rates[49] == 0.4
    assert rates[50:] == [0.4] * 10
    differences = [b - a for a, b in itertools.pairwise(rates[:50])]
    assert differences == pytest.approx([0.006] * 49)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_warmup_is_horovods(size: int) -> None:
    steps, epochs, base = 7, 3, 0.05
    target = scaled_lr(base, size, "linear")
    for epoch in range(epochs):
        for step in range(steps):
            x = epoch + step / steps + 1 / steps
            expected = target / size * (x * (size - 1) / epochs + 1)
            assert warmup_lr(epoch * steps + step, steps, base, target, epochs) == pytest.approx(
                expected
            )


def test_warmup_of_sqrt_scaling_runs_from_base_to_scaled() -> None:
    target = scaled_lr(0.1, 9, "sqrt")
    rates = [warmup_lr(step, 10, 0.1, target, 2) for step in range(21)]
    assert rates[0] == pytest.approx(0.1 + 0.2 / 20)
    assert rates[19:] == [target, target]
    assert rates == sorted(rates)


def test_no_warmup() -> None:
    assert warmup_lr(0, 10, 0.1, 0.4, 0) == 0.4
    assert {warmup_lr(step, 10, 0.1, 0.1, 5) for step in range(60)} == {0.1}


def test_warmup_that_ends_within_an_epoch() -> None:
    rates = [warmup_lr(step, 10, 0.1, 0.4, 0.55) for step in range(10)]
    assert max(rates) == 0.4
    assert rates[5:] == [0.4] * 5
    assert all(math.isfinite(rate) for rate in rates)


def rates(**settings: Any) -> list[float]:
    """Return the rates of a run of 4 epochs of 10 steps, from 0.1 to 0.4."""
    chosen = ScheduleSettings(
        **{"steps_per_epoch": 10, "steps": 40, "base_lr": 0.1, "target_lr": 0.4, **settings}
    )
    return [learning_rate(step, chosen) for step in range(chosen.steps)]


def of_torch(make: Callable[[torch.optim.Optimizer], Any], steps: int) -> list[float]:
    """Return the rates that a scheduler of torch gives, from 0.4."""
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
    got = rates(schedule="step", milestones=(1.5, 3), decay=0.2)
    assert got == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("schedule", ["cosine", "polynomial"])
def test_the_decay_begins_where_the_warmup_ends(schedule: str) -> None:
    got = rates(schedule=schedule, warmup_epochs=1.5, final_lr=0.02, power=0.9)
    plain = rates(warmup_epochs=1.5)
    assert got[:15] == plain[:15]
    assert got[14] == 0.4
    assert got[15] < 0.4
    assert got[-1] == 0.02
    middle = 14 + 25 / 2  # half of the decay's 25 steps lies between two of them
    around = (got[math.floor(middle)] + got[math.ceil(middle)]) / 2
    power = 0.5 if schedule == "cosine" else 0.5**0.9
    assert around == pytest.approx(0.02 + 0.38 * power, abs=1e-3)


def test_milestones_are_epochs_of_the_run_and_the_warmup_goes_first() -> None:
    got = rates(schedule="step", warmup_epochs=2, milestones=(1, 3))
    assert got[:19] == rates(warmup_epochs=2)[:19]
    assert got[19:30] == pytest.approx([0.04] * 11)
    assert got[30:] == pytest.approx([0.004] * 10)


def test_a_run_that_is_all_warmup_does_not_decay() -> None:
    for schedule in SCHEDULES:
        assert rates(schedule=schedule, warmup_epochs=5) == rates(warmup_epochs=5)
        assert rates(schedule=schedule, steps=1) == [0.4]


@given(
    st.sampled_from(SCHEDULES),
    st.integers(1, 30),
    st.integers(1, 6),
    st.floats(0, 8),
    st.floats(0.2, 3),
)
def test_a_rate_stays_between_the_ends(
    schedule: str, per_epoch: int, epochs: int, warmup: float, power: float
) -> None:
    got = rates(
        schedule=schedule,
        steps_per_epoch=per_epoch,
        steps=per_epoch * epochs,
        warmup_epochs=warmup,
        milestones=(1, 2),
        final_lr=0.001,
        power=power,
    )
    top = got.index(max(got))
    assert got[: top + 1] == sorted(got[: top + 1])
    assert got[top:] == sorted(got[top:], reverse=True)
    assert all(0.001 <= rate <= 0.4 for rate in got)


def test_milestones_as_people_write_them() -> None:
    assert parse_milestones("30, 60,80.5") == (30.0, 60.0, 80.5)
    assert parse_milestones("") == ()
    for text in ("30,20", "30,30", "0", "-1", "30,,60", "thirty", "inf", "1,nan"):
        with pytest.raises(UsageError, match=r"--milestones must be ascending epochs.*30,60,80"):
            parse_milestones(text)
