"""Streams of samples, which have no length and no index, split between ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Generic, TypeVar

from hvdtrain.data.sampling.position import Position
from hvdtrain.data.sampling.sharding import rank_slice, resolve_rank, steps_per_epoch
from hvdtrain.errors import UsageError

__all__ = ["StreamBatches"]

T = TypeVar("T")


class StreamBatches(Position, Generic[T]):
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

    def __len__(self) -> int:
        """Return the number of batches left of this epoch, the same on all ranks."""
        return steps_per_epoch(self.samples - self.consumed, self.batch_size)

    def __iter__(self) -> Iterator[tuple[list[T], int]]:
        """Yield the items of this rank, and how many of them count."""
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
