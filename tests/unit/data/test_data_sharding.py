"""Every sample has its place: the same order on any number of ranks, each sample once."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.data.sampling.sharding import (
    epoch_permutation,
    global_batch,
    rank_slice,
    steps_per_epoch,
)

SAMPLES = st.integers(1, 300)
BATCHES = st.integers(1, 350)
SIZES = st.integers(1, 40)


@given(SAMPLES, st.integers(0, 2**63 - 1), st.integers(0, 1000))
def test_permutation_is_one_and_comes_again(samples: int, seed: int, epoch: int) -> None:
    order = epoch_permutation(samples, seed, epoch)
    assert sorted(order) == list(range(samples))
    np.random.seed(1)  # a global generator has no say
    assert np.array_equal(order, epoch_permutation(samples, seed, epoch))


def test_permutation_differs_between_epochs_and_seeds() -> None:
    orders = [epoch_permutation(50, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4


def test_permutation_is_the_one_that_checkpoints_rely_on() -> None:
    assert epoch_permutation(8, seed=3, epoch=2).tolist() == [1, 7, 4, 0, 2, 6, 3, 5]


@given(SAMPLES, BATCHES, SIZES)
def test_ranks_together_follow_the_permutation(samples: int, batch: int, size: int) -> None:
    order = epoch_permutation(samples, 5, 7)
    seen: list[int] = []
    for step in range(steps_per_epoch(samples, batch)):
        whole = global_batch(order, step, batch)
        parts = [whole[rank_slice(len(whole), rank, size)] for rank in range(size)]
        lengths = [len(part) for part in parts]
        assert max(lengths) - min(lengths) <= 1
        seen += np.concatenate(parts).tolist()
    assert seen == order.tolist()


@given(st.integers(0, 300), SIZES)
def test_evaluation_shards_cover_everything_once(samples: int, size: int) -> None:
    items = list(range(samples))
    shards = [items[rank_slice(samples, rank, size)] for rank in range(size)]
    assert [item for shard in shards for item in shard] == items


def test_last_batch_is_short() -> None:
    order = np.arange(1437)
    assert steps_per_epoch(1437, 50) == 29
    assert len(global_batch(order, 28, 50)) == 37
    assert steps_per_epoch(100, 50) == 2
