"""Samplers: together the ranks follow the permutation, across stops and other numbers of ranks."""

import hashlib
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from hvdtrain.data import (
    EvaluationSampler,
    GlobalBatchSampler,
    StreamBatches,
    sample_generator,
    sample_seed,
    seed_generators,
    step_seed,
)
from hvdtrain.data.sampling import epoch_permutation
from hvdtrain.errors import UsageError

SAMPLES = st.integers(1, 200)
BATCHES = st.integers(1, 60)
SIZES = st.integers(1, 9)
# Runs of one job: batch size, ranks, and after how many steps it is stopped.
RUNS = st.lists(st.tuples(BATCHES, SIZES, st.integers(0, 12)), min_size=1, max_size=4)


def world(samples: int, batch: int, size: int, seed: int = 3) -> list[GlobalBatchSampler]:
    return [GlobalBatchSampler(samples, batch, seed, rank, size) for rank in range(size)]


def real(sampler: GlobalBatchSampler) -> list[list[int]]:
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


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # in torchdata 0.11
@pytest.mark.parametrize(("workers", "advances"), [(0, False), (0, True), (2, True)])
def test_stateful_loaders_resume_on_other_ranks(workers: int, advances: bool) -> None:
    data = TensorDataset(torch.arange(50))
    # Of the 13 batches of epoch 0, the epoch that is set before, and the one that is resumed.
    for done, asked, epoch in ((0, 0, 0), (3, None, 0), (13, None, 1), (13, 0, 0), (13, 1, 1)):
        (sampler,) = world(50, 4, 1)
        loader = StatefulDataLoader(data, batch_sampler=sampler, num_workers=workers)
        batches = iter(loader)
        for _ in range(done):
            next(batches)
            if advances:
                sampler.advance()
        rest, later = [], []
        for sampler in world(50, 4, 2):
            again = StatefulDataLoader(data, batch_sampler=sampler, num_workers=workers)
            again.load_state_dict(loader.state_dict())
            if asked is not None:
                sampler.set_epoch(asked)
            batches = iter(again)
            assert len(again) == len(sampler.counts)
            rest.append([batch.tolist() for (batch,) in batches])
            sampler.set_epoch(epoch + 1)
            later.append([batch.tolist() for (batch,) in again])
        expected = epoch_permutation(50, 3, epoch)[0 if epoch else 4 * done :]
        for found, order in ((rest, expected), (later, epoch_permutation(50, 3, epoch + 1))):
            steps = zip(*found, strict=True)
            assert [index for step in steps for part in step for index in part] == order.tolist()


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


def test_seeds_are_the_ones_that_checkpoints_rely_on() -> None:
    numbers = b"".join(number.to_bytes(8, "little") for number in (3, 2, 1))
    for make, purpose in ((sample_seed, b"sample"), (step_seed, b"step")):
        digest = hashlib.blake2b(numbers, digest_size=8, person=purpose).digest()
        assert make(3, 2, 1) == int.from_bytes(digest, "little")
    assert sample_generator(3, 2, 1).integers(1000, size=4).tolist() == [272, 146, 24, 782]
    assert epoch_permutation(8, seed=3, epoch=2).tolist() == [1, 7, 4, 0, 2, 6, 3, 5]


def test_global_generators() -> None:
    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand([]))]

    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        draws = []
        for seed in (2**64 - 1, 5, 2**64 - 1):
            seed_generators(seed)
            draws.append(draw())
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
    assert draws[0] == draws[2]
    assert all(one != other for one, other in zip(draws[0], draws[1], strict=True))


class Numbers:
    """Yields epoch * 1000 + 0, 1, 2 ..."""

    def __init__(self, count: int) -> None:
        self.count, self.epoch, self.read = count, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        for number in range(self.count):
            self.read += 1
            yield self.epoch * 1000 + number


class Sharded(Numbers):
    """Has every so manieth of them in a shard, as tf.data does."""

    def shard(self, num_shards: int, index: int) -> Iterator[int]:
        return (number for number in self if number % num_shards == index)


def steps(
    stream: Numbers, samples: int, batch: int, size: int, state: dict[str, int] | None = None
) -> tuple[list[list[int]], list[StreamBatches[int]]]:
    ranks = [StreamBatches(stream, samples, batch, rank, size) for rank in range(size)]
    for batches in ranks if state else []:
        batches.load_state_dict(state or {})
    lists = [[(items, count) for items, count in batches] for batches in ranks]
    assert all(items for yielded in lists for items, _ in yielded)
    assert {len(yielded) for yielded in lists} == {len(ranks[0])}
    together = zip(*lists, strict=True)
    return [[n for items, count in step for n in items[:count]] for step in together], ranks


@given(st.integers(1, 80), st.integers(1, 30), st.tuples(st.integers(1, 5), st.integers(1, 5)))
def test_it_goes_on_with_other_ranks(samples: int, batch: int, sizes: tuple[int, int]) -> None:
    got, ranks = steps(Numbers(samples), samples, batch, sizes[0])
    done = len(got) // 2
    for _ in range(done):
        ranks[0].advance()
    rest, _ = steps(Numbers(samples), samples, batch, sizes[1], ranks[0].state_dict())
    assert [n for step in got[:done] + rest for n in step] == list(range(samples))


@given(st.integers(1, 80), st.integers(1, 6), st.integers(1, 6))
def test_shards_are_used_once(samples: int, rows: int, size: int) -> None:
    samples = max(samples, size)
    got, ranks = steps(Sharded(samples), samples, rows * size, size)
    assert not ranks[0].exact
    assert sorted(n for step in got for n in step) == list(range(samples))


def test_a_rank_reads_no_more_than_an_epoch() -> None:
    stream = Numbers(100)
    steps(stream, 10, 4, 2)
    assert stream.read == 2 * 10
    batches = StreamBatches(stream, 10, 4, 0, 2)
    batches.set_epoch(3)
    assert next(iter(batches)) == ([3000, 3001], 2)


def test_bad_streams() -> None:
    with pytest.raises(UsageError, match="ended after 7 of 10 samples: each iteration must start"):
        list(StreamBatches(Numbers(7), 10, 4, 1, 2))
    with pytest.raises(UsageError, match="ended after 0 of 10 samples"):
        list(StreamBatches(iter([]), 10, 4, 0, 2))
    with pytest.raises(UsageError, match="shard 2 of 3 of the iterable is empty"):
        list(StreamBatches(Sharded(2), 6, 3, 2, 3))
    with pytest.raises(UsageError, match="a batch of 2 gives some of 3 ranks nothing"):
        StreamBatches(Sharded(9), 9, 2, 0, 3)
