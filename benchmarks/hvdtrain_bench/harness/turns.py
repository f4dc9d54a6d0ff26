"""Contenders that take turns, so that whatever slows the machine affects all of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from random import Random
from statistics import median
from typing import TYPE_CHECKING

import torch

from hvdtrain_bench.harness.results import PeerFacts

if TYPE_CHECKING:
    from hvdtrain_bench.harness.ranks import Ranks

_MOST_CALLS = 2000


@dataclass
class Contender:
    """Something that is timed and checked.

    Attributes:
        prepare: sets values whose result is known.
        check: raises WrongResultError unless the result is that of so many calls since prepare.
        most_calls: number of calls after which the result must be checked.
        turn: starts and stops what must not run while the others have their turn.
        meets: whether ranks synchronize before each call, because the call itself does not.
    """

    name: str
    library: str
    prepare: Callable[[], None]
    call: Callable[[], None]
    check: Callable[[int], None]
    most_calls: int = _MOST_CALLS
    turn: Callable[[], AbstractContextManager[None]] = nullcontext
    meets: bool = False


@dataclass
class Turns:
    """The measurements of all contenders.

    Attributes:
        seconds: time of one call for each repeat: median of the slowest rank.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    peers: list[PeerFacts] = field(default_factory=list)


def take_turns(
    ranks: Ranks,
    contenders: Sequence[Contender],
    repeats: int,
    seconds_per_turn: float,
    fewest_calls: int = 3,
) -> Turns:
    """Time all contenders once in each repeat, in an order that changes (collective).

    Args:
        repeats: number of turns of each contender, after one to warm up.
    """
    found = Turns()
    calls = {}
    for contender in contenders:
        with contender.turn():
            seconds = _batch(ranks, contender, 1)[0]
            found.peers.append(facts(ranks, contender.name, contender.library))
        wanted = int(seconds_per_turn / ranks.largest(seconds))
        calls[contender.name] = min(max(fewest_calls, wanted), _MOST_CALLS)
        found.seconds[contender.name] = []
    for repeat in range(repeats):
        for contender in Random(repeat).sample(contenders, len(contenders)):
            seconds = _one_turn(ranks, contender, calls[contender.name])
            found.seconds[contender.name].append(seconds)
    return found


def _one_turn(ranks: Ranks, contender: Contender, calls: int) -> float:
    times: list[float] = []
    with contender.turn():
        while len(times) < calls:
            times += _batch(ranks, contender, min(calls - len(times), contender.most_calls - 1))
    return ranks.largest(median(times))


def _batch(ranks: Ranks, contender: Contender, calls: int) -> list[float]:
    """Time that many calls, after one that synchronizes the ranks; check the result."""
    contender.prepare()
    ranks.rest()
    ranks.meet()
    contender.call()
    times = []
    for _ in range(calls):
        if contender.meets:
            ranks.meet()
        started = time.perf_counter()
        contender.call()
        times.append(time.perf_counter() - started)
    ranks.rest()
    contender.check(calls + 1)
    return times


def facts(ranks: Ranks, name: str, library: str) -> PeerFacts:
    """Return the description of a contender at this moment (collective)."""
    threads = int(ranks.largest(len(os.listdir("/proc/self/task"))))
    return PeerFacts(name, library, torch.get_num_threads(), threads, ranks.cores())
