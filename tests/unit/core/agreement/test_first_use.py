"""What threads of a rank settle once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from hvdtrain.core.agreement.channel import Channel, FirstUse

THREADS = 8


class _Key:
    """Stands for a channel, which is a key here only."""


def _in_threads(work: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=work, args=[number]) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_one_thread_settles_what_all_get() -> None:
    first_use, channel = FirstUse(), cast("Channel", _Key())
    asked: list[int] = []
    results: list[Any] = []
    arrived = threading.Barrier(THREADS)

    def work(number: int) -> None:
        arrived.wait(300)

        def agree() -> int:
            asked.append(number)
            return number

        results.append(first_use.settle(channel, "size", agree))

    _in_threads(work)
    assert len(asked) == 1
    assert results == asked * THREADS
    assert first_use.find(channel, "size") == asked[0]


def test_keys_and_channels_are_settled_apart() -> None:
    first_use, one, other = FirstUse(), cast("Channel", _Key()), cast("Channel", _Key())

    def inner() -> int:
        return first_use.settle(one, "size", lambda: 1)

    assert first_use.settle(one, "plan", inner) == 1
    assert first_use.settle(other, "size", lambda: 2) == 2
    assert first_use.find(other, "plan") is None


def test_each_thread_tries_again_after_an_error() -> None:
    first_use, channel = FirstUse(), cast("Channel", _Key())
    failed: list[int] = []
    arrived = threading.Barrier(THREADS)

    def refuse() -> None:
        raise ValueError("a rank has joined")

    def work(number: int) -> None:
        arrived.wait(300)
        try:
            first_use.settle(channel, "size", refuse)
        except ValueError:
            failed.append(number)

    _in_threads(work)
    assert sorted(failed) == list(range(THREADS))
    assert first_use.settle(channel, "size", lambda: 3) == 3
    assert first_use.settle(channel, "size", lambda: pytest.fail("asked twice")) == 3
