"""Channels of three ranks: in several threads, interrupted, and the reports that ranks exchange.

The arguments name the cases. Rank 0 does one thing in each of them, and the others another.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
from raising import raising
from ranks import report

from hvdtrain import engines
from hvdtrain.buffer import Buffer
from hvdtrain.config import Config
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.agreement.driver import ReportExchange
from hvdtrain.core.agreement.lifecycle import Report
from hvdtrain.core.agreement.operation import Operation, Request
from hvdtrain.core.allreduce import Allreduce
from hvdtrain.core.membership import answer_with_zeros
from hvdtrain.engines.communicator import Communicator
from hvdtrain.types import ReduceOp

# A limit that only ends a hang.
HANGS_AFTER_SECONDS = 240
WORLD = engines.open_world("mpi", Config.from_environ(os.environ), os.environ).communicator
RANKS = range(WORLD.size)


def opened() -> Communicator:
    """Open a communicator, in whose calls no thread may be beside another one."""
    found, busy = WORLD.split(RANKS), threading.Lock()
    assert found is not None

    def alone(plain: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        assert busy.acquire(blocking=False), f"{plain.__name__}() beside another thread's call"
        try:
            return plain(*arguments, **named)
        finally:
            busy.release()

    for name in ("allreduce", "allreduce_from", "allgather"):
        setattr(found, name, partial(alone, getattr(found, name)))
    return found


def open_channel() -> Channel:
    title = f"[rank {WORLD.rank}/{WORLD.size}]"
    return Channel(opened(), RANKS, title, answer_with_zeros, "world")


def summed(name: str, count: int = 1) -> Allreduce:
    return Allreduce([Buffer.from_array(np.ones(count))], [(count,)], ReduceOp.SUM, name)


def leave(channel: Channel) -> None:
    channel.wait(channel.leave())
    channel.close()


def a_thread_is_not_kept_by_another_that_drives() -> None:
    channel, ran = open_channel(), list[str]()

    def in_turn(names: str) -> None:
        for name in names:
            channel.run(summed(name))
            ran.append(name)

    orders = ("x", "yz") if WORLD.rank == 0 else ("yzx",)
    threads = [threading.Thread(target=in_turn, args=[names], daemon=True) for names in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS_AFTER_SECONDS)
    assert sorted(ran) == ["x", "y", "z"], ran  # else a thread hangs, or has failed
    leave(channel)


def what_is_submitted_while_a_rank_joins_is_not_lost() -> None:
    """The rank answers the others with zeros, under the very names that it submits meanwhile."""
    for count in (1, 2) * 3:
        channel = open_channel()
        if WORLD.rank == 0:
            joined = channel.join()
            late = [summed(f"x{number}", count) for number in range(20)]
            for one in late:
                channel.submit(one, hurry=True)
            channel.wait(joined)
            leave(channel)
            assert all(operation.done for operation in late)
            continue
        for number in range(20):
            operation = summed(f"x{number}")
            channel.submit(operation)
            with channel.waiting(operation):
                while not operation.done:
                    channel.poll(operation)
        channel.wait(channel.join())
        leave(channel)


class Interrupted:
    """Stands for the handler of a signal that raises when an operation has been added."""

    def submitted(self, operation: Operation) -> None:
        raise KeyboardInterrupt


def an_operation_is_run_whose_submission_is_interrupted() -> None:
    for ahead in ([], ["ahead 0", "ahead 1"]):
        channel = open_channel()
        if WORLD.rank == 0:
            for name in ahead:
                channel.submit(summed(name))
            channel.queue.track = Interrupted()
            with raising(KeyboardInterrupt):
                channel.submit(summed("x"))
            channel.queue.track = None
        else:
            for name in ["x", *ahead]:
                channel.run(summed(name))
        leave(channel)


def told(numbers: Iterable[int], prefix: str = "x", joined_seconds: float = 0.0) -> Report:
    requests = [Request("allreduce", f"{prefix} {n}", (("shape", str(n)),)) for n in numbers]
    awaited = frozenset(request.key for request in requests[::2])
    return Report(tuple(requests), awaited, joined_seconds)


def requests_that_overlap_are_the_same_everywhere() -> None:
    # The last does not fit into the first block, even if all of its requests have numbers.
    for count in (0, 1, 2, 50, 300):
        exchange = ReportExchange(opened())
        for shift in (0, 0, 1, 2):
            own = [told(range(r * shift, count + r), joined_seconds=r / 3) for r in RANKS]
            received = exchange(own[WORLD.rank])
            assert list(received) == own
            requests = {request.key: request for theirs in received for request in theirs.requests}
            assert all(requests[q.key] is q for theirs in received for q in theirs.requests)


def names_that_change_do_not_fill_the_memory() -> None:
    exchange = ReportExchange(opened())
    for step in range(6):
        own = [told(range(500 * r, 500 * r + 1000), f"step {step}") for r in RANKS]
        assert list(exchange(own[WORLD.rank])) == own
    assert len(exchange._requests) < 6 * 2000


for name in sys.argv[1:]:
    globals()[name]()
report(len(sys.argv) - 1)
