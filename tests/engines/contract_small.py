"""The contract of what engines may have: votes with data, batches, messages of pairs of ranks."""

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hvdtrain.buffer import Buffer
from hvdtrain.core.agreement.driver import HASHES
from hvdtrain.core.agreement.operation import UNNAMED, Request
from hvdtrain.engines.communicator import (
    VOTE_DONE,
    Communicator,
    PointToPoint,
    VotedReduction,
    poll_until,
)
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


class _Many:
    def __init__(self, c: Communicator, dtype: DType, counts: Sequence[int]) -> None:
        self._sources = sources = [_mine(c, count, dtype) for count in counts]
        self._targets = [s if i % 2 else np.zeros_like(s) for i, s in enumerate(sources)]
        self._before = [target.tolist() for target in self._targets]
        self._sums = [_sum(c, count).tolist() for count in counts]
        self.pieces = array("q")
        for source, target in zip(sources, self._targets, strict=True):
            self.pieces.extend((source.ctypes.data, target.ctypes.data, source.size))

    def check(self, done: bool) -> None:
        expected = self._sums if done else self._before
        assert [target.tolist() for target in self._targets] == expected


def vote(c: Communicator, dtype: DType) -> None:
    """Vote and reduce at once, beside ranks that propose something else, or vote without data."""
    reduction = c.voted_reduction(dtype, ReduceOp.SUM, 1.0, 1.0)
    assert (reduction is not None) == c.capabilities.tree_sums
    if reduction is not None:
        for counts in ((100,), (300_001,), (0,), _COUNTS, (100,), _MORE_COUNTS):
            _vote(c, reduction, dtype, counts)
        calls = reduction.calls(100)
        for number in range(4) if calls else ():
            assert calls is not None
            many, request = _Many(c, dtype, (100,)), Request("allreduce", f"{UNNAMED}{number}")
            if number % 2 and c.rank == c.size - 1:
                assert reduction(request.ballot * HASHES, many.pieces) == b""
            else:
                calls[0](Request("allreduce").ballot, number, many.pieces[0])
                verdict = calls[1](many.pieces[1])
                assert verdict == VOTE_DONE or reduction.finish(verdict) == b"", number
            many.check(True)


def _vote(c: Communicator, reduction: VotedReduction, dtype: DType, counts: Sequence[int]) -> None:
    last, alone = c.rank == c.size - 1, c.size == 1
    for number in range(6):
        many = _Many(c, dtype, counts)
        ballot = _OTHER if number == 2 and last else _BALLOT
        # Several requests come in another order on each rank; what they are is at the end.
        first = ballot * 2 if len(counts) == 1 else bytes([c.rank] * 32)
        if number == 4 and c.rank == 0:
            values = np.frombuffer(bytearray(first + ballot), np.uint64)
            c.start_max(values).wait()
            highest = values.tobytes()
        else:
            highest = reduction(first + ballot, many.pieces)
        done = number != 4 and (number != 2 or alone)
        assert (highest == b"") == done, number
        many.check(done)
        if number == 4:
            assert (
                highest == (ballot * 2 if len(counts) == 1 else bytes([c.size - 1] * 32)) + ballot
            )


_NUMBERS, _FLOATS = 0, 1
_FLOAT_COUNTS = (0, 1, 1001)


def exchange_messages(c: Communicator) -> None:
    """Each rank sends each, also itself, two messages of each size and a row of another tag."""
    messages = c.point_to_point()
    sent = [_floats(c.rank, count) for count in (*_FLOAT_COUNTS, *_FLOAT_COUNTS)]
    got = [[np.empty_like(floats) for floats in sent] for _ in range(c.size)]
    row = np.array([c.rank, -c.rank])
    pending = [
        messages.start_send(Buffer.of(floats), rank, _FLOATS)
        for rank in range(c.size)
        for floats in sent
    ]
    pending += [messages.start_send(Buffer.of(row), rank, _NUMBERS) for rank in range(c.size)]
    senders = [_receive_row(messages) for _ in range(c.size)]
    assert sorted(senders) == list(range(c.size)), senders
    assert messages.waiting(_NUMBERS) is None
    pending += [
        messages.start_receive(Buffer.of(floats), rank, _FLOATS)
        for rank, of_rank in enumerate(got)
        for floats in of_rank
    ]
    for operation in pending:
        operation.wait()
    for rank, of_rank in enumerate(got):
        for floats in of_rank:
            np.testing.assert_array_equal(floats, _floats(rank, len(floats)))
    messages.close()


def _floats(rank: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return rank + np.arange(count) / 8


def _receive_row(messages: PointToPoint) -> int:
    found: list[int] = []

    def arrived() -> bool:
        rank = messages.waiting(_NUMBERS)
        if rank is not None:
            found.append(rank)
        return bool(found)

    poll_until(arrived)
    row = np.empty(2, np.int64)
    messages.start_receive(Buffer.of(row), found[0], _NUMBERS).wait()
    assert row.tolist() == [found[0], -found[0]], row
    return found[0]
