"""Metrics: values by hand, and sums over any cut of the samples."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.errors import UsageError
from hvdtrain.train.metrics import (
    Accuracy,
    ConfusionMatrix,
    Gathered,
    MeanOf,
    Metric,
    TopK,
)

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


def test_uneven_parts_weigh_as_many_samples_as_they_have() -> None:
    """Two of three and one of one are 0.75, not the mean 0.8333 of both."""
    first = (SCORES[[0, 1, 3]], TARGETS[[0, 1, 3]])
    second = (SCORES[:1], TARGETS[:1])
    assert value(Accuracy(), first, second) == 0.75


@given(st.integers(1, 30), st.lists(st.integers(0, 30), max_size=4), st.integers(0, 2**32))
def test_any_cut_gives_the_same(samples: int, cuts: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 3, (samples, 3), generator=generator).float()
    targets = torch.randint(0, 3, (samples,), generator=generator)
    ends = [0, *sorted(min(cut, samples) for cut in cuts), samples]
    parts = [(scores[a:b], targets[a:b]) for a, b in itertools.pairwise(ends)]
    for metric in ADDING:
        assert value(metric, *parts) == value(metric, (scores, targets))


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


def test_a_function_of_all_samples() -> None:
    metric = Gathered(lambda outputs, targets: (outputs.argmax(1) == targets).max())
    assert metric.value(SCORES.numpy(), TARGETS.numpy()) == 1.0


def test_which_way_is_up() -> None:
    assert [m.higher_is_better for m in ADDING] == [True, True, None, False]
    assert MeanOf(distance, higher_is_better=True).higher_is_better
    assert Gathered(lambda outputs, targets: 0.0).higher_is_better


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


def test_counts_stay_exact_where_float32_would_not() -> None:
    many = np.array([2.0**24 + 1, 2.0**24 + 3])
    assert Accuracy().value(many) == (2**24 + 1) / (2**24 + 3)
