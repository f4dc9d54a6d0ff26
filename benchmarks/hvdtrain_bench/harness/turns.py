"""Contenders that take turns, so that whatever slows the machine affects all of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from random import Random
from statistics import median
from typing import TYPE_CHECKING, TypeVar

from hvdtrain_bench.harness.results import PeerFacts

if TYPE_CHECKING:
    from hvdtrain_bench.harness.ranks import Ranks

T = TypeVar("T")
_MOST_CALLS = 2000


@dataclass
class Contender:
    """Something that is timed and checked."""

    name: str
    library: str
    prepare: Callable[[], None]  # sets values whose result is known
    call: Callable[[], None]
    # Raises WrongResultError unless the result is that of so many calls since prepare.
    check: Callable[[int], None]
    most_calls: int = _MOST_CALLS  # after which the result must be checked
    # Starts and stops what must not run while the others have their turn.
    turn: Callable[[], AbstractContextManager[None]] = nullcontext
    meets: bool = False  # whether ranks synchronize before each call, which does not do it itself


@dataclass
class Turns:
    """The measurements of all contenders."""

    # Time of one call in each repeat: the median of the slowest rank.
    seconds: dict[str, list[float]] = field(default_factory=dict)
    peers: list[PeerFacts] = field(default_factory=list)


def in_turns(contenders: Sequence[T], repeats: int) -> Iterator[tuple[int, T]]:
    """Yield all contenders in each repeat: first in their order, then in one at random."""
    for repeat in range(repeats):
        order = Random(repeat).sample(contenders, len(contenders)) if repeat else contenders
        for contender in order:
            yield repeat, contender


def take_turns(
    ranks: Ranks,
    contenders: Sequence[Contender],
    repeats: int,
    seconds_per_turn: float,
    fewest_calls: int = 3,
) -> Turns:
    """Time all contenders once in each repeat, after a turn of each to warm up (collective)."""
    found = Turns()
    calls = {}
    for contender in contenders:
        with contender.turn():
            seconds = _batch(ranks, contender, 1)[0]
            found.peers.append(facts(ranks, contender.name, contender.library))
        wanted = int(seconds_per_turn / ranks.largest(seconds))
        calls[contender.name] = min(max(fewest_calls, wanted), _MOST_CALLS)
        found.seconds[contender.name] = []
    for _, contender in in_turns(contenders, repeats):
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
    import torch

    threads = int(ranks.largest(len(os.listdir("/proc/self/task"))))
    return PeerFacts(name, library, torch.get_num_threads(), threads, ranks.cores())
