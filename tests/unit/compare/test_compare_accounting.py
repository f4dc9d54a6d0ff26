"""Samples that were really seen, and the distance of weights."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hvdtrain_compare.figures.accounting import (
    SampleCount,
    count_samples,
    largest_difference,
    worst,
)
from hvdtrain_compare.protocol.task import Place
from hvdtrain_compare.torch.division import Division, ExactDivision, PaddedDivision
from hypothesis import given
from hypothesis import strategies as st


def of(*parts: list[int]) -> list[np.ndarray]:
    return [np.array(part, np.int64) for part in parts]


def test_duplicates_and_losses() -> None:
    assert count_samples(of([0, 2], [1, 3]), 4) == SampleCount(4, 4, 0, 0)
    assert count_samples(of([0, 2, 0], [1, 0]), 4) == SampleCount(4, 5, 2, 1)
    assert count_samples(of([], []), 2) == SampleCount(2, 0, 0, 2)
    assert count_samples(of([0, 2, 0], [1, 0]), 4).text == "5, 2 twice, 1 never"
    assert count_samples(of([1], [0]), 2).text == "2"
    with pytest.raises(ValueError, match="from 0 to 1, got 2"):
        count_samples(of([0], [2]), 2)


def test_the_worst_epoch_counts() -> None:
    good, bad = SampleCount(4, 4, 0, 0), SampleCount(4, 3, 0, 1)
    assert worst([good, bad, good]) is bad


@given(
    st.integers(1, 200),
    st.integers(1, 5),
    st.integers(1, 9),
    st.sampled_from([ExactDivision, PaddedDivision]),
)
def test_divisions(samples: int, size: int, each: int, kind: type) -> None:
    """All processes together take in each step what one process would take."""
    order = np.random.default_rng(samples).permutation(samples).astype(np.int64)
    ranks: list[Division] = [kind(Place(rank, size), size * each) for rank in range(size)]
    shares = [rank.train_shares(order) for rank in ranks]
    alone = ExactDivision(Place(0, 1), size * each).train_shares(order)
    assert {len(share) for share in shares} == {len(alone)}
    for step, whole in enumerate(alone[:-1]):
        together = np.concatenate([share[step] for share in shares])
        assert sorted(together) == sorted(whole)
    seen = count_samples([np.concatenate(share) for share in shares], samples)
    tested = count_samples([rank.test_share(samples) for rank in ranks], samples)
    padding = 0 if kind is ExactDivision else -samples % size
    assert (seen.lost, seen.duplicates) == (0, padding)
    assert (tested.lost, tested.duplicates) == (0, padding)


def test_the_largest_difference() -> None:
    one = {"a": np.array([1.0, 2.0]), "b": np.array([[3.0]])}
    other = {"a": np.array([1.0, 2.5]), "b": np.array([[2.75]])}
    assert largest_difference(one, other) == 0.5
    assert largest_difference(one, one) == 0
    assert math.isnan(largest_difference(one, {**other, "b": np.array([[np.nan]])}))
    with pytest.raises(ValueError, match="differ in b"):
        largest_difference(one, {**one, "b": np.zeros(2)})
