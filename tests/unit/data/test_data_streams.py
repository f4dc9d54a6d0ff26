"""Streams split between ranks: exact where every rank reads all, else each item at most once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.data import StreamBatches
from hvdtrain.errors import UsageError


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
    """Return what all ranks together take in each step, in their order, and their streams."""
    ranks = [StreamBatches(stream, samples, batch, rank, size) for rank in range(size)]
    for batches in ranks if state else []:
        batches.load_state_dict(state or {})
    lists = [[(items, count) for items, count in batches] for batches in ranks]
    assert all(items for yielded in lists for items, _ in yielded)
    assert {len(yielded) for yielded in lists} == {len(ranks[0])}
    together = zip(*lists, strict=True)
    return [[n for items, count in step for n in items[:count]] for step in together], ranks


@given(st.integers(1, 80), st.integers(1, 30), st.integers(1, 6), st.integers(0, 9))
def test_the_order_is_that_of_the_stream(samples: int, batch: int, size: int, more: int) -> None:
    got, ranks = steps(Numbers(samples + more), samples, batch, size)
    assert ranks[0].exact
    assert [n for step in got for n in step] == list(range(samples))
    assert [len(step) for step in got[:-1]] == [batch] * (len(got) - 1)


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


def test_a_shard_goes_on_and_a_long_one_is_cut() -> None:
    got, ranks = steps(Sharded(20), 12, 4, 2)  # 10 in each shard, 3 steps of 2
    assert got == [[0, 2, 1, 3], [4, 6, 5, 7], [8, 10, 9, 11]]
    ranks[0].advance()
    rest, _ = steps(Sharded(20), 12, 4, 2, ranks[0].state_dict())
    assert rest == got[1:]


def test_a_rank_reads_no_more_than_an_epoch() -> None:
    stream = Numbers(100)
    steps(stream, 10, 4, 2)
    assert stream.read == 2 * 10
    batches = StreamBatches(stream, 10, 4, 0, 2)
    batches.set_epoch(3)
    assert next(iter(batches)) == ([3000, 3001], 2)


def test_bad_streams() -> None:
    with pytest.raises(UsageError, match="ended after 7 of 10 samples: it must yield as many"):
        list(StreamBatches(Numbers(7), 10, 4, 1, 2))
    with pytest.raises(UsageError, match="ended after 0 of 10 samples"):
        list(StreamBatches(iter([]), 10, 4, 0, 2))
    with pytest.raises(UsageError, match="shard 2 of 3 of the iterable is empty"):
        list(StreamBatches(Sharded(2), 6, 3, 2, 3))
    with pytest.raises(UsageError, match="a batch of 2 gives some of 3 ranks nothing"):
        StreamBatches(Sharded(9), 9, 2, 0, 3)
