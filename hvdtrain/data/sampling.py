"""Which samples each rank takes: splits, samplers, streams, positions and seeds (local)."""

from __future__ import annotations

import hashlib
import random
import struct
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from hvdtrain.errors import UsageError

__all__ = [
    "EvaluationSampler",
    "GlobalBatchSampler",
    "Position",
    "StreamBatches",
    "sample_generator",
    "sample_seed",
    "seed_generators",
    "step_seed",
]

_THREE_NUMBERS = struct.Struct("<3Q")
_NUMPY_BITS = 0xFFFF_FFFF


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """Return the seed for everything random about one sample in one epoch, 64 bits.

    Args:
        seed: seed of the run.
        epoch: epoch, counted from 0.
        index: index of the sample in its data set.

    Raises:
        ValueError: a number is negative, or has more than 64 bits.
    """
    return _mixed(b"sample", seed, epoch, index)


def step_seed(seed: int, step: int, part: int) -> int:
    """Return the seed for everything random in one part of a step, 64 bits.

    Args:
        seed: seed of the run.
        step: step, counted from 0 over all epochs.
        part: rank, or number of a virtual shard.

    Raises:
        ValueError: a number is negative, or has more than 64 bits.
    """
    return _mixed(b"step", seed, step, part)


def sample_generator(seed: int, epoch: int, index: int) -> np.random.Generator:
    """Return a generator for one sample in one epoch, in 12 microseconds.

    Args:
        seed: seed of the run.
        epoch: epoch, counted from 0.
        index: index of the sample in its data set.
    """
    return np.random.Generator(np.random.PCG64(sample_seed(seed, epoch, index)))


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python and numpy, and of torch if it is imported (local).

    GPUs that torch has not used yet are left alone: queuing a seed for them takes longer than a
    small step of training.

    Args:
        seed: 64-bit seed; numpy's generator takes the lower 32 bits.
    """
    random.seed(seed)
    np.random.seed(seed & _NUMPY_BITS)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)


def _mixed(purpose: bytes, *numbers: int) -> int:
    """Hash three numbers: streams of neighboring seeds must be independent."""
    try:
        packed = _THREE_NUMBERS.pack(*numbers)
    except struct.error:
        raise ValueError(f"seeds must be integers from 0 to 2^64 - 1, got {numbers}") from None
    digest = hashlib.blake2b(packed, digest_size=8, person=purpose).digest()
    return int.from_bytes(digest, "little")


T = TypeVar("T")


class Position(ABC, Generic[T]):
    """An epoch, and how many of its samples all ranks together have used.

    It moves by advance() only, never by reading ahead, so that a position saved with the weights is
    the one that the weights have seen.

    Args:
        samples: samples of an epoch, of all ranks.
        batch_size: samples of all ranks per step.
        same: further numbers by name that must be the same when a state is loaded.

    Attributes:
        epoch: epoch, counted from 0.
        consumed: samples of this epoch that optimizer steps have used.

    Raises:
        ValueError: a number is less than 1.
    """

    def __init__(self, samples: int, batch_size: int, same: Mapping[str, int]) -> None:
        if samples < 1:
            raise ValueError(f"samples must be at least 1, got {samples}")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.samples, self.batch_size = samples, batch_size
        self.epoch, self.consumed = 0, 0
        self._asked: int | None = None  # of set_epoch()
        self._same = {"samples": samples, **same}

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch; if it is the current one, continue in it (local, on all ranks)."""
        self._asked = epoch
        if epoch != self.epoch:
            self.epoch, self.consumed = epoch, 0

    def advance(self) -> None:
        """Record that a global batch was used; after the last one the next epoch starts (local).

        Call it after each optimizer step, on all ranks.
        """
        self.consumed += self.batch_size
        if self.consumed >= self.samples:
            self.epoch, self.consumed = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Return what a checkpoint needs to resume here (local); the same on all ranks."""
        return {"epoch": self.epoch, "consumed": self.consumed, **self._same}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resume where state_dict() was called, on any number of ranks (local, on all ranks).

        Args:
            state: result of state_dict().

        Raises:
            UsageError: the state belongs to other data, or to another order.
        """
        for name, value in self._same.items():
            if state.get(name) != value:
                raise UsageError(
                    f"the saved position is for {name} {state.get(name)}, but this run has {name} "
                    f"{value}: use the same, or start a new epoch"
                )
        self.epoch, self.consumed = state["epoch"], state["consumed"]

    def _resume(self, state: Mapping[str, int]) -> None:
        """Load the state of an iterator; after an epoch's last batch, in the epoch asked for."""
        self.load_state_dict(state)
        if self.consumed >= self.samples and self._asked != self.epoch:
            self.epoch, self.consumed = self.epoch + 1, 0

    def __len__(self) -> int:
        """Return the number of batches left of this epoch, the same on all ranks."""
        return steps_per_epoch(self.samples - self.consumed, self.batch_size)

    def __iter__(self) -> Iterator[T]:
        """Return an iterator over the batches from this position on.

        Its state_dict() is the position after the batches that it has returned. torchdata's
        StatefulDataLoader saves it, and iter(loader) loads it, on any number of ranks. Call
        set_epoch() for each epoch: otherwise each has the batches that were left of the first.
        """
        return _Batches(self)

    @abstractmethod
    def _left(self) -> Iterator[T]:
        """Return the batches from this position on; what moves it later does not change them."""


class _Batches(Iterator[T]):
    def __init__(self, position: Position[T]) -> None:
        self._position = position
        self._state, self._left = position.state_dict(), position._left()

    def __next__(self) -> T:
        batch = next(self._left)
        self._state["consumed"] += self._position.batch_size
        return batch

    def state_dict(self) -> dict[str, int]:
        return {**self._state, "consumed": min(self._state["consumed"], self._position.samples)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._position._resume(state)
        self.__init__(self._position)  # type: ignore[misc]


Indices = npt.NDArray[np.int64]


def epoch_permutation(samples: int, seed: int, epoch: int) -> Indices:
    """Return the order of the training samples in one epoch, int64 [samples].

    The order is a function of `seed` and `epoch` alone: never of the rank, the size or the
    state of a global random generator.
    """
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, epoch))))
    return generator.permutation(samples).astype(np.int64)


def steps_per_epoch(samples: int, global_batch_size: int) -> int:
    """Return the number of global batches that hold all samples; the last may be short."""
    return -(-samples // global_batch_size)


def global_batch(permutation: Indices, step: int, global_batch_size: int) -> Indices:
    """Return the samples of one global batch: permutation[jB : (j + 1)B].

    Args:
        permutation: order of the samples, int64 [n].
    """
    return permutation[step * global_batch_size : (step + 1) * global_batch_size]


def rank_slice(samples: int, rank: int, size: int) -> slice:
    """Return the contiguous part of `samples` items that belongs to `rank`.

    The parts of all ranks follow each other, cover every item exactly once and differ in
    length by at most one; with fewer items than ranks some are empty.
    """
    return slice(rank * samples // size, (rank + 1) * samples // size)


def resolve_rank(rank: int | None, size: int | None) -> tuple[int, int]:
    """Return rank and size; those of init() if neither is given."""
    if rank is None and size is None:
        # Deferred, so that data sets can be read without importing the communication core.
        from hvdtrain.core import horovod_api as world

        return world.rank(), world.size()
    if rank is None or size is None:
        raise ValueError(f"give both rank and size, or neither: got rank {rank}, size {size}")
    if not 0 <= rank < size:
        raise ValueError(f"rank must be between 0 and size - 1: got rank {rank}, size {size}")
    return rank, size


class GlobalBatchSampler(Position[list[int]]):
    """Yield this rank's part of each global batch that is left of an epoch, as a list of indices.

    Use it as `batch_sampler` of a torch DataLoader. The order of an epoch is a function of seed
    and epoch alone. Each sample is used once an epoch, on one rank; the parts of a batch differ by
    at most one sample. Every rank gets the same number of batches: a rank without a sample in a
    short last batch gets one index for the sake of its shape, which must not count.

    Everything is local; make the same calls on all ranks.

    Args:
        samples: number of samples.
        batch_size: samples of all ranks per step; the last batch of an epoch may have fewer.
        seed: seed of the order; the same on all ranks.
        rank: this rank, together with `size`; None: as init() found it.
        size: number of ranks.

    Raises:
        ValueError: a number is out of range.
        NotInitializedError: rank and size are not given, before init().
    """

    def __init__(
        self,
        samples: int,
        batch_size: int,
        seed: int = 0,
        rank: int | None = None,
        size: int | None = None,
    ) -> None:
        super().__init__(samples, batch_size, {"seed": seed})
        self._seed = seed
        self._rank, self._size = resolve_rank(rank, size)

    def _left(self) -> Iterator[list[int]]:
        return self._parts(self._order(), padded=True)

    @property
    def counts(self) -> list[int]:
        """Number of indices that count in each list of __iter__(); 0 if its only index is a filler.

        Read it once, before the loop, together with the loader: zip(loader, sampler.counts). Of a
        StatefulDataLoader call iter() before.
        """
        parts = [self._mine(count) for count in self.global_counts]
        return [part.stop - part.start for part in parts]

    @property
    def global_counts(self) -> list[int]:
        """Number of samples of all ranks in each batch, which turns a sum into their mean."""
        left = self.samples - self.consumed
        return [min(self.batch_size, left - start) for start in range(0, left, self.batch_size)]

    def indices(self) -> Indices:
        """Return this rank's samples of the rest of the epoch, in order, int64 [sum(counts)]."""
        return np.array(
            [index for part in self._parts(self._order(), padded=False) for index in part],
            dtype=np.int64,
        )

    def _order(self) -> Indices:
        return epoch_permutation(self.samples, self._seed, self.epoch)[self.consumed :]

    def _mine(self, count: int) -> slice:
        return rank_slice(count, self._rank, self._size)

    def _parts(self, order: Indices, padded: bool) -> Iterator[list[int]]:
        for step in range(steps_per_epoch(len(order), self.batch_size)):
            batch = global_batch(order, step, self.batch_size)
            mine = batch[self._mine(len(batch))]
            yield (batch[:1] if padded and not len(mine) else mine).tolist()


class EvaluationSampler:
    """Yield this rank's samples to evaluate: each sample on exactly one rank, in order.

    Use it as `sampler` of a torch DataLoader. Nothing is padded or omitted, so that ranks may
    differ by one sample and in their number of batches, or have none: add up sums and counts
    locally, and reduce them once, after the loop. Everything is local.

    Args:
        samples: number of samples.
        rank: this rank, together with `size`; None: as init() found it.
        size: number of ranks.

    Raises:
        ValueError: a number is out of range.
        NotInitializedError: rank and size are not given, before init().
    """

    def __init__(self, samples: int, rank: int | None = None, size: int | None = None) -> None:
        if samples < 0:
            raise ValueError(f"samples must be at least 0, got {samples}")
        part = rank_slice(samples, *resolve_rank(rank, size))
        self._mine = range(part.start, part.stop)

    def __len__(self) -> int:
        """Return the number of samples of this rank."""
        return len(self._mine)

    def __iter__(self) -> Iterator[int]:
        """Yield their indices."""
        return iter(self._mine)

    def indices(self) -> Indices:
        """Return their indices, int64 [n]."""
        return np.array(self._mine, dtype=np.int64)


class StreamBatches(Position[tuple[list[T], int]], Generic[T]):
    """Yield this rank's part of each batch that is left of an epoch: (items, how many count).

    If the stream has no method `shard`, this is exact: every rank reads the whole stream, in its
    order, and keeps its part of each global batch. The batches therefore do not depend on the
    number of ranks, each item is used once an epoch, and a position is valid on any number of
    ranks. The price is that each rank reads, decodes and, when it resumes within an epoch, skips
    everything.

    With `stream.shard(num_shards=, index=)`, as in tf.data and Hugging Face's datasets, each rank
    reads only its own shard. No item is used twice in an epoch, but the batches are specific to the
    number of ranks. Every rank makes ceil(samples / batch_size) steps: items of a shard beyond them
    are omitted, and a rank whose shard ends early continues with batches that do not count.
    Resuming within an epoch is exact with the same number of ranks and batch size.

    In either case items is never empty; if the count is 0, it holds one item for the sake of its
    shape. Everything is local; make the same calls on all ranks.

    Args:
        stream: restarts each time that it is iterated over; its set_epoch(epoch), if it has one, is
            called before.
        samples: items of an epoch, of all ranks; further ones are omitted.
        batch_size: items of all ranks per step; the last batch may have fewer.
        rank: this rank, together with `size`; None: as init() found it.
        size: number of ranks.

    Raises:
        ValueError: a number is out of range.
        NotInitializedError: rank and size are not given, before init().
        UsageError: a stream with shards and fewer samples per step than ranks; a stream that ends
            before `samples` items, or an empty shard (while iterating).
    """

    def __init__(
        self,
        stream: Iterable[T],
        samples: int,
        batch_size: int,
        rank: int | None = None,
        size: int | None = None,
    ) -> None:
        super().__init__(samples, batch_size, {})
        self._stream = stream
        self._rank, self._size = resolve_rank(rank, size)
        if not self.exact and batch_size < self._size:
            raise UsageError(
                f"a batch of {batch_size} gives some of {self._size} ranks nothing of their own "
                "shards: use a larger batch"
            )

    @property
    def exact(self) -> bool:
        """Whether the batches are the same on any number of ranks."""
        return not hasattr(self._stream, "shard")

    def _left(self) -> Iterator[tuple[list[T], int]]:
        if hasattr(self._stream, "set_epoch"):
            self._stream.set_epoch(self.epoch)
        if self.exact:
            return self._of_all(self.consumed)
        return self._of_shard(self._stream, len(self))

    def _of_all(self, consumed: int) -> Iterator[tuple[list[T], int]]:
        items = iter(self._stream)
        read = sum(1 for _ in islice(items, consumed))
        while read < self.samples:
            wanted = min(self.batch_size, self.samples - read)
            batch = list(islice(items, wanted))
            read += len(batch)
            if len(batch) < wanted:
                raise UsageError(
                    f"the iterable ended after {read} of {self.samples} samples: each iteration "
                    "must start from the beginning and yield all of them"
                )
            mine = batch[rank_slice(wanted, self._rank, self._size)]
            yield mine or batch[:1], len(mine)

    def _of_shard(self, stream: Any, steps: int) -> Iterator[tuple[list[T], int]]:
        items = iter(stream.shard(num_shards=self._size, index=self._rank))
        part = rank_slice(self.batch_size, self._rank, self._size)
        rows = part.stop - part.start
        filler = list(deque(islice(items, self.consumed * rows // self.batch_size), maxlen=1))
        for _ in range(steps):
            mine = list(islice(items, rows))
            filler = mine[:1] or filler
            if not filler:
                raise UsageError(
                    f"shard {self._rank} of {self._size} of the iterable is empty: use at most as "
                    "many ranks as it has shards"
                )
            yield mine or filler, len(mine)
