"""The contract of what engines may have for small operations: votes with data, and batches."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hvdtrain.engines.communicator import Communicator
from hvdtrain.engines.features import Verdict, VotedReduction
from hvdtrain.types import DType, ReduceOp

_COUNTS = (5, 0, 700, 1, 3001)
_MORE_COUNTS = (0, 70_001, 5, 0, 300_000, 1)
_BALLOT = bytes(range(8)) + bytes(255 - byte for byte in range(8))
_OTHER = bytes(8) + bytes([255] * 8)


def _mine(c: Communicator, count: int, dtype: DType) -> npt.NDArray[np.generic]:
    return (3 * c.rank + np.arange(count) % 7).astype(dtype.numpy)


def _sum(c: Communicator, count: int) -> npt.NDArray[np.int64]:
    sums: npt.NDArray[np.int64] = 3 * c.size * (c.size - 1) // 2 + c.size * (np.arange(count) % 7)
    return sums


def reduce_many(c: Communicator, dtype: DType) -> None:
    """Sum arrays of several sizes, in place and not, in one chunk and in several."""
    for counts in (_COUNTS, _MORE_COUNTS, _COUNTS):
        many = _Many(c, dtype, counts)
        done = c.allreduce_many(many.pieces, dtype, ReduceOp.SUM)
        assert done or not c.capabilities.tree_sums
        many.check(done)


class _Many:
    """Arrays of several sizes, every other one to be reduced in place."""

    def __init__(self, c: Communicator, dtype: DType, counts: Sequence[int]) -> None:
        self._sources = sources = [_mine(c, count, dtype) for count in counts]
        self._targets = [s if i % 2 else np.zeros_like(s) for i, s in enumerate(sources)]
        self._before = [target.tolist() for target in self._targets]
        self._sums = [_sum(c, count).tolist() for count in counts]
        self.pieces = array("q")
        for source, target in zip(sources, self._targets, strict=True):
            self.pieces.extend((source.ctypes.data, target.ctypes.data, source.size))

    def check(self, done: bool) -> None:
        """Require that they are the sums if they were reduced, and are unchanged otherwise."""
        expected = self._sums if done else self._before
        assert [target.tolist() for target in self._targets] == expected


def _vote_on_many(c: Communicator, dtype: DType, counts: Sequence[int]) -> None:
    last, shared = c.rank == c.size - 1, c.capabilities.tree_sums
    for number in range(4):
        many = _Many(c, dtype, counts)
        # The requests come in another order on each rank; what they are is at the end.
        ballot = _OTHER if number == 1 and last else _BALLOT
        votes = np.frombuffer(bytearray(bytes([c.rank] * 32) + ballot), np.uint64)
        done = False
        if number == 2 and last:
            c.start_max(votes).wait()
        else:
            done = c.vote_on_many(votes, many.pieces, dtype, ReduceOp.SUM)
        assert done == (shared and number in (0, 3)), number
        many.check(done)
        if number == 2:
            assert votes.tobytes() == bytes([c.size - 1] * 32) + _BALLOT


def vote(c: Communicator, dtype: DType) -> None:
    """Vote and reduce at once, beside ranks that propose something else, or vote without data."""
    for count in (100, 300_001):
        reduction = c.voted_reduction(count, dtype, ReduceOp.SUM, 1.0, 1.0)
        if reduction is not None:
            _vote(c, reduction, _mine(c, count, dtype))
    for counts in (_COUNTS, _MORE_COUNTS):
        _vote_on_many(c, dtype, counts)


def _vote(c: Communicator, reduction: VotedReduction, source: npt.NDArray[np.generic]) -> None:
    target = np.zeros_like(source)
    for number in range(6):
        ballot = _OTHER if number == 2 and c.rank == c.size - 1 else _BALLOT
        target[:] = 0
        if number == 4 and c.rank == 0:
            values = np.frombuffer(bytearray(ballot * 3), np.uint64)
            c.start_max(values).wait()
            verdict = Verdict.AGREED if values.tobytes() == ballot * 3 else Verdict.DIFFERENT
        else:
            verdict = reduction(ballot, source.ctypes.data, target.ctypes.data)
        alone = c.size == 1
        differs = Verdict.DONE if alone else Verdict.DIFFERENT
        expected = {2: differs, 4: Verdict.AGREED}.get(number, Verdict.DONE)
        assert verdict is expected, (number, verdict)
        count = source.size
        result = _sum(c, count) if verdict is Verdict.DONE else np.zeros(count)
        assert target.tolist() == result.tolist()
