"""Checks that all ranks still train the same model, and that its loss is finite."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdtrain.arrays import concatenate
from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core import context, operations
from hvdtrain.core.objects import allgather_object
from hvdtrain.errors import NotFiniteError
from hvdtrain.topology import format_ranks
from hvdtrain.train.metrics import Totals
from hvdtrain.types import ReduceOp

Words = npt.NDArray[np.int64]

# A row, its products and the multipliers together fit into a second-level cache.
ROW_WORDS = 1 << 15
_SHIFT = 29


@cache
def multipliers() -> Words:
    """Return the multipliers m, int64 [ROW_WORDS]: the first results of splitmix64, made odd."""
    state = np.arange(1, ROW_WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    numbers: Words = ((mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)).view(np.int64)
    return numbers


def array_checksum(array: npt.NDArray[Any]) -> int:
    """Return the checksum of an array's bytes, between -2^63 and 2^63 - 1."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    words = np.zeros(-(-data.size // 8), np.int64)
    words.view(np.uint8)[: data.size] = data
    return int(words_checksum(words, multipliers(), 1))


def words_checksum(words: Any, factors: Any, rows: int) -> Any:
    """Return the checksum of int64 words, an array or a tensor, in one such word.

    `rows` is the number of rows that are copied temporarily at a time.
    """
    whole = len(words) // ROW_WORDS * ROW_WORDS
    pieces = [
        words[start : min(start + rows * ROW_WORDS, whole)].reshape(-1, ROW_WORDS)
        for start in range(0, whole, rows * ROW_WORDS)
    ]
    if whole < len(words):
        pieces.append(words[whole:].reshape(1, -1))
    sums = []
    for piece in pieces:
        mixed = piece >> _SHIFT
        mixed ^= piece
        mixed *= factors[: piece.shape[1]]
        sums.append(mixed.sum(1))
    if not sums:
        return words.sum()  # 0
    joined: Any = concatenate(sums)
    return joined[0] if len(joined) == 1 else words_checksum(joined, factors, rows)


def number_checksum(number: float) -> int:
    return array_checksum(np.array(number))


@collective
def replica_difference(checksums: Mapping[str, int]) -> str | None:
    """Return the difference between the ranks' checksums, None if all are equal.

    If all are equal, it costs one reduction of 16 bytes.
    """
    text = "\n".join(f"{name} {value}" for name, value in checksums.items())
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    own = int.from_bytes(digest, "little", signed=True)
    # ~x decreases as x grows: one MIN reduction finds both extremes.
    extremes = np.array([own, ~own], np.int64)
    operations.allreduce(
        context.current().world,
        [Buffer.from_array(extremes)],
        [extremes.shape],
        ReduceOp.MIN,
        "replica watch",
    ).run()
    if extremes[0] == ~extremes[1]:
        return None
    return difference_text(allgather_object(dict(checksums), "replica watch"))


def require_finite(learned: Totals, steps: int, last: int) -> None:
    """Check the loss of some steps; torch's loop checks each step itself and reports more."""
    if not math.isfinite(learned.loss):
        raise NotFiniteError(
            f"steps {last - steps + 1} to {last}: the training loss is {learned.loss}. Lower --lr, "
            "lengthen --warmup-epochs, set --clip-norm, or look at the samples"
        )


def difference_text(checksums: Sequence[Mapping[str, int]]) -> str:
    """Describe the first name whose checksums differ, and the ranks where they do."""
    names = list(dict.fromkeys(name for of_rank in checksums for name in of_rank))
    values = {name: [of_rank.get(name) for of_rank in checksums] for name in names}
    different = [name for name in names if len(set(values[name])) > 1]
    if not different:
        return "the names of the checksums come in another order on each rank"
    first = different[0]
    return f"{first} {_where(values[first])} ({len(different)} of {len(names)} checksums differ)"


def _where(values: Sequence[int | None]) -> str:
    [(usual, count), *_] = Counter(values).most_common()
    odd = [rank for rank, value in enumerate(values) if value != usual]
    if 2 * count > len(values):
        others = "rank" if count == 1 else f"{count} ranks"
        return f"on {format_ranks(odd)} is not that of the other {others}"
    return f"differs between {format_ranks(range(len(values)))}"
