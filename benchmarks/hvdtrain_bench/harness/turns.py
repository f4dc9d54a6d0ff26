"""Contenders that take turns, so that whatever slows the machine affects all of them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

from hvdtrain_bench.harness.results import Case, MeasurementSettings, PeerFacts, Result

if TYPE_CHECKING:
    from hvdtrain_bench.harness.ranks import Ranks

T = TypeVar("T")
_MOST_CALLS = 2000
_LONG_SECONDS = 20.0


@dataclass(eq=False)
class Contender:
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


def in_turns(contenders: Sequence[T], repeats: int) -> Iterator[tuple[int, T]]:
    """Yield all contenders in each repeat: first in their order, then in one at random."""
    for repeat in range(repeats):
        order = Random(repeat).sample(contenders, len(contenders)) if repeat else contenders
        for contender in order:
            yield repeat, contender


class Bench:
    """What all ranks of a job measure together: contenders in turns, and the cases so far."""

    def __init__(self, kind: str, ranks: Ranks, settings: MeasurementSettings) -> None:
        self.ranks, self.settings = ranks, settings
        self.result = Result(kind, ranks.size, 1, [], {}, [])

    def say(self, text: str) -> None:
        if self.ranks.rank == 0:
            print(f"  {self.result.kind}: {text}", file=sys.stderr, flush=True)

    def note(self, name: str, library: str) -> None:
        """Keep the description of a contender as it is at this moment (collective)."""
        peers = self.result.peers
        names = [*(peer.name for peer in peers), name]
        place = names.index(name)
        peers[place : place + 1] = [facts(self.ranks, name, library)]

    def add(
        self,
        name: str,
        values: dict[str, list[float]],
        base: str = "",
        again: str = "",
        unit: str = "seconds",
        **about: Any,
    ) -> None:
        self.result.cases.append(Case(name, about, unit, values, base, again))

    def take_turns(
        self, contenders: Sequence[Contender], seconds_per_turn: float = 0.0, fewest_calls: int = 3
    ) -> dict[str, list[float]]:
        """Time a call of each contender in each repeat, after one to warm up (collective).

        The time is the median of a turn's calls on the slowest rank.
        """
        seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
        calls = {}
        repeats, expected = self.settings.repeats, 0.0
        for contender in contenders:
            with contender.turn():
                once = self.ranks.largest(_batch(self.ranks, contender, 1)[0])
                self.note(contender.name, contender.library)
            count = min(max(fewest_calls, int(seconds_per_turn / once)), _MOST_CALLS)
            calls[contender.name] = count
            expected += repeats * (1 + count) * once
        if expected > _LONG_SECONDS:
            self.say(f"about {expected / 60:.1f} minutes")
        for _, contender in in_turns(contenders, repeats):
            times: list[float] = []
            with contender.turn():
                while missing := calls[contender.name] - len(times):
                    count = min(missing, contender.most_calls - 1)
                    times += _batch(self.ranks, contender, count)
            seconds[contender.name].append(self.ranks.largest(median(times)))
        return seconds


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
