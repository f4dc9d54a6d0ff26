"""Samplers: together the ranks follow the permutation, across stops and other numbers of ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from hvdtrain.data import EvaluationSampler, GlobalBatchSampler
from hvdtrain.data.sampling.sharding import epoch_permutation
from hvdtrain.errors import NotInitializedError, UsageError

SAMPLES = st.integers(1, 200)
BATCHES = st.integers(1, 60)
SIZES = st.integers(1, 9)
# Runs of one job: batch size, ranks, and after how many steps it is stopped.
RUNS = st.lists(st.tuples(BATCHES, SIZES, st.integers(0, 12)), min_size=1, max_size=4)


def world(samples: int, batch: int, size: int, seed: int = 3) -> list[GlobalBatchSampler]:
    return [GlobalBatchSampler(samples, batch, seed, rank, size) for rank in range(size)]


def real(sampler: GlobalBatchSampler) -> list[list[int]]:
    """Return a rank's batches without what only fills them up."""
    pairs = zip(sampler, sampler.counts, strict=True)
    return [indices if count else [] for indices, count in pairs]


@given(SAMPLES, st.integers(0, 5), RUNS)
def test_each_sample_once_in_order_whatever_stops(
    samples: int, epoch: int, runs: list[tuple[int, int, int]]
) -> None:
    seen: list[int] = []
    saved = {"epoch": epoch, "consumed": 0, "samples": samples, "seed": 3}
    for batch, size, steps in [*runs, (7, 4, samples)]:
        if saved["epoch"] != epoch:
            break
        ranks = world(samples, batch, size)
        for sampler in ranks:
            sampler.load_state_dict(saved)
        for parts in list(zip(*map(real, ranks), strict=True))[:steps]:
            seen += [index for part in parts for index in part]
            for sampler in ranks:
                sampler.advance()
        states = [sampler.state_dict() for sampler in ranks]
        saved = states[0]
        assert states == [saved] * size
    assert seen == epoch_permutation(samples, 3, epoch).tolist()
    assert saved == {"epoch": epoch + 1, "consumed": 0, "samples": samples, "seed": 3}


@given(SAMPLES, BATCHES, SIZES)
def test_ranks_make_as_many_steps(samples: int, batch: int, size: int) -> None:
    ranks = world(samples, batch, size)
    batches = [list(sampler) for sampler in ranks]
    assert {len(lists) for lists in batches} == {-(-samples // batch)} == {len(r) for r in ranks}
    for step, totals in enumerate(ranks[0].global_counts):
        counts = [sampler.counts[step] for sampler in ranks]
        assert sum(counts) == totals
        assert max(counts) - min(counts) <= 1
        whole = {index for lists in batches for index in lists[step]}
        for lists, count in zip(batches, counts, strict=True):
            assert len(lists[step]) == max(1, count)  # never empty, for the sake of its shape
            assert set(lists[step]) <= whole
    for sampler in ranks:
        flat = [index for indices in real(sampler) for index in indices]
        assert sampler.indices().tolist() == flat
        assert sampler.indices().dtype == np.int64


@given(st.integers(0, 300), SIZES)
def test_evaluation_sees_each_sample_once(samples: int, size: int) -> None:
    ranks = [EvaluationSampler(samples, rank, size) for rank in range(size)]
    assert [index for sampler in ranks for index in sampler] == list(range(samples))
    assert [len(sampler) for sampler in ranks] == [len(list(sampler)) for sampler in ranks]
    assert np.concatenate([sampler.indices() for sampler in ranks]).tolist() == [*range(samples)]


def test_epochs_follow_each_other() -> None:
    sampler = GlobalBatchSampler(10, 4, seed=3, rank=0, size=1)
    orders = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        orders.append(sampler.indices().tolist())
        for _ in list(sampler):
            sampler.advance()
    assert (sampler.epoch, sampler.consumed) == (2, 0)
    assert orders == [epoch_permutation(10, 3, epoch).tolist() for epoch in range(2)]
    sampler.advance()
    sampler.set_epoch(2)  # goes on
    assert sampler.consumed == 4
    sampler.set_epoch(0)
    assert sampler.indices().tolist() == orders[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_reads_ahead_does_not_move_the_position(workers: int) -> None:
    data = TensorDataset(torch.arange(37) * 10)
    seen, ranks = [], world(37, 8, 2)
    loader = DataLoader(data, batch_sampler=ranks[0], num_workers=workers)
    for step, ((batch,), count) in enumerate(zip(loader, ranks[0].counts, strict=True)):
        seen += batch.tolist()[:count]
        ranks[0].advance()
        if step == 1:
            break
    assert len(loader) == 3  # what is left
    state = ranks[0].state_dict()
    assert state["consumed"] == 16
    seen += [index * 10 for parts in real(ranks[1])[:2] for index in parts]
    for sampler in world(37, 8, 3):
        sampler.load_state_dict(state)
        seen += (sampler.indices() * 10).tolist()
    assert sorted(seen) == [index * 10 for index in range(37)]


@pytest.mark.parametrize(
    ("samples", "seed", "fault"),
    [
        (11, 3, "is for samples 10, but this run has samples 11"),
        (10, 4, "is for seed 3, but this run has seed 4"),
    ],
)
def test_a_position_of_other_data_is_refused(samples: int, seed: int, fault: str) -> None:
    state = world(10, 4, 1)[0].state_dict()
    with pytest.raises(UsageError, match=fault):
        world(samples, 4, 1, seed)[0].load_state_dict(state)


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({"samples": 0}, "samples must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"rank": 2}, "between 0 and size - 1: got rank 2, size 2"),
        ({"rank": -1}, "got rank -1, size 2"),
        ({"size": None}, "give both rank and size, or neither: got rank 0, size None"),
    ],
)
def test_wrong_arguments(arguments: dict[str, int | None], fault: str) -> None:
    good: dict[str, int | None] = {"samples": 5, "batch_size": 2, "rank": 0, "size": 2}
    with pytest.raises(ValueError, match=fault):
        GlobalBatchSampler(**{**good, **arguments})  # type: ignore[arg-type]


def test_without_rank_and_size_there_must_be_a_world() -> None:
    with pytest.raises(NotInitializedError, match="init"):
        EvaluationSampler(5)
    with pytest.raises(ValueError, match="samples must be at least 0, got -1"):
        EvaluationSampler(-1, 0, 1)
