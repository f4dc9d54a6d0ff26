"""A library that does not sum right is found out, whatever it does instead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hvdtrain_bench.cases.models import MODELS
from hvdtrain_bench.cases.sums import (
    WrongResultError,
    fill,
    most_calls,
    require_factor,
    sum_contender,
    sum_factor,
)

COUNT = 70_001
RANKS: Any = SimpleNamespace(rank=1, size=3, title="[rank 1/3]")


def right(tensor: torch.Tensor) -> torch.Tensor:
    """Sum as three ranks do: the first time 1 + 2 + 3 from 2, and then of three equal parts."""
    return tensor.mul_(3)


def nothing(tensor: torch.Tensor) -> torch.Tensor:
    """Leave all as it is."""
    return tensor


def all_but_the_last(tensor: torch.Tensor) -> torch.Tensor:
    """Forget one element."""
    tensor[:-1].mul_(3)
    return tensor


def too_much(tensor: torch.Tensor) -> torch.Tensor:
    """Count a rank twice."""
    return tensor.mul_(4)


def run(reduce: Any, calls: int) -> None:
    """Call it so often, and check."""
    peer: Any = SimpleNamespace(name="made", library="none", reduce=reduce, turn=None)
    contender = sum_contender(RANKS, peer, torch.empty(COUNT))
    contender.prepare()
    for _ in range(calls):
        contender.call()
    contender.check(calls)


@pytest.mark.parametrize("calls", [1, 2, 7, most_calls(3)])
def test_a_right_sum_passes(calls: int) -> None:
    run(right, calls)


@pytest.mark.parametrize("reduce", [nothing, all_but_the_last, too_much])
@pytest.mark.parametrize("calls", [1, 7])
def test_a_wrong_sum_is_found(reduce: Any, calls: int) -> None:
    with pytest.raises(WrongResultError, match=r"rank 1/3.* made: element \d+ is .*, but must be"):
        run(reduce, calls)


@pytest.mark.parametrize("ranks", [2, 3, 8, 4096])
def test_sums_stay_within_a_float32(ranks: int) -> None:
    calls = most_calls(ranks)
    assert calls >= 5
    assert 8 * sum_factor(ranks, calls) < torch.finfo(torch.float32).max
    tensor = torch.empty(9)
    fill(tensor, sum_factor(ranks, calls))
    require_factor(tensor, sum_factor(ranks, calls), "here")


@pytest.mark.parametrize(
    ("name", "millions"),
    [("mlp", 25.2), ("transformer", 27.3), ("resnet50", 25.6), ("mnist-cnn", 1.2)],
)
def test_models_have_the_size_that_they_say(name: str, millions: float) -> None:
    model = MODELS[name]
    torch.manual_seed(0)
    module = model.build()
    count = sum(parameter.numel() for parameter in module.parameters())
    assert round(count / 1e6, 1) == millions
    assert f"{millions} M" in model.title
    inputs, targets = model.make_batch(2, seed=0)
    loss = model.loss(module.eval()(inputs), targets)
    assert 0 < float(loss.detach()) < 20
