"""The contract of messages between pairs of ranks."""

from __future__ import annotations

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.engines.communicator import Communicator
from hvdtrain.engines.features import PointToPoint
from hvdtrain.polling import poll_until

_NUMBERS, _FLOATS = 0, 1
_COUNTS = (0, 1, 1001)


def exchange_messages(c: Communicator) -> None:
    """Each rank sends each, also itself, two messages of each size and a row of another tag."""
    messages = c.point_to_point()
    sent = [_floats(c.rank, count) for count in (*_COUNTS, *_COUNTS)]
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
