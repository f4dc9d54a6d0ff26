"""A parameter server: its settings, and what it does with the requests of the workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.core.gradients.exchange import options_of, parse_options
from hvdtrain.errors import UsageError

ALLREDUCE, PARAMETER_SERVER = "allreduce", "ps"
ASYNC, SYNC = "async", "sync"


@dataclass(frozen=True)
class ParameterServer:
    """The options of the parameter server."""

    servers: int = 1
    mode: str = ASYNC
    staleness: int = 4
    backup: int = 0

    @property
    def is_async(self) -> bool:
        """Whether each gradient is an update of its own."""
        return self.mode == ASYNC


def parse_strategy(label: str, text: str) -> ParameterServer | None:
    """Return the parameter server that a text such as "ps:servers=2,mode=sync" describes."""
    if text == ALLREDUCE:
        return None
    name, _, given = text.partition(":")
    if name != PARAMETER_SERVER:
        raise UsageError(f"{label} must be {ALLREDUCE} or {PARAMETER_SERVER}, got {text!r}")
    subject = f"{label} {text}"
    try:
        values = parse_options(subject, given, options_of(ParameterServer))
    except ValueError as error:
        raise UsageError(str(error)) from None
    made = ParameterServer(**values)  # type: ignore[arg-type]
    _check(subject, made, values)
    return made


def _check(label: str, made: ParameterServer, given: Mapping[str, Any]) -> None:
    for name, least in (("servers", 1), ("staleness", 0), ("backup", 0)):
        if getattr(made, name) < least:
            raise UsageError(f"{label}: {name} must be at least {least}, got {given[name]}")
    if made.mode not in (ASYNC, SYNC):
        raise UsageError(f"{label}: mode must be {ASYNC} or {SYNC}, got {made.mode!r}")
    other = "backup" if made.is_async else "staleness"
    if other in given:
        raise UsageError(f"{label}: {other} is no option of mode={made.mode}: leave it out")
    if made.backup and made.servers > 1:
        raise UsageError(
            f"{label}: backup needs servers=1: several servers could count different gradients"
        )


# Tags. A worker sends requests and gradients, a server answers and weights.
REQUEST, GRADIENT, ANSWER, WEIGHTS = range(4)

# A request has its kind, the samples in the round, and the version of the worker's weights; an
# answer to a pull whether the round is over, and the version of the weights.
PULL, PUSH = range(2)


@dataclass
class Pushes:
    """Gradients that servers have received."""

    staleness: Counter[int] = field(default_factory=Counter)
    dropped: int = 0

    def add(self, other: Pushes) -> None:
        self.staleness += other.staleness
        self.dropped += other.dropped

    def record(self) -> dict[str, Any]:
        """Return the counts for summary.json."""
        total = sum(value * count for value, count in self.staleness.items())
        return {
            "applied": self.applied,
            "dropped": self.dropped,
            "mean_staleness": total / max(self.applied, 1),
            "staleness": {str(value): self.staleness[value] for value in sorted(self.staleness)},
        }

    @property
    def applied(self) -> int:
        return self.staleness.total()


@dataclass(frozen=True)
class Update:
    """One step of the optimizer."""

    round: int
    weights: Mapping[int, float]


class Protocol(ABC):
    """The state of one server between two pauses of the run.

    Each worker repeats: pull the weights of a round, compute, push the gradient. Rounds are counted
    from 0, separately for each worker.
    """

    def __init__(self, workers: int) -> None:
        self.version, self.pushes = 0, Pushes()
        self._rounds = [0] * workers  # rounds that each worker has pushed, or was late for
        self._pulls: dict[int, int] = {}  # samples of the workers that wait for weights

    @property
    def rounds_done(self) -> int:
        """The number of rounds that every worker is done with."""
        return min(self._rounds)

    def pull(self, worker: int, samples: int) -> None:
        self._pulls[worker] = samples

    def answers(self) -> list[tuple[int, bool]]:
        """Return the workers that can be answered now, and whether each is late.

        Their requests are taken as answered.
        """
        answers = [(w, self._is_late(w)) for w in sorted(self._pulls) if self._may_answer(w)]
        for worker, late in answers:
            samples = self._pulls.pop(worker)
            if late:
                self._rounds[worker] += 1
                self.pushes.dropped += samples > 0
        return answers

    @abstractmethod
    def push(self, worker: int, samples: int, version: int) -> Update | None:
        """Take a worker's gradient; return the update to make now, if any."""

    @abstractmethod
    def _may_answer(self, worker: int) -> bool:
        """Return whether a pull can be answered now."""

    def _is_late(self, worker: int) -> bool:
        """Return whether the round of a pull is over."""
        return False


class AsynchronousProtocol(Protocol):
    """Each gradient is an update of its own, in the order of arrival.

    A worker begins round c only when every worker has pushed its round c - staleness - 1: no worker
    is more than `staleness` rounds ahead of the slowest one (stale synchronous parallel). Between a
    worker's pull and its push, each other worker pushes at most 2 staleness + 1 times.
    """

    def __init__(self, workers: int, staleness: int) -> None:
        super().__init__(workers)
        self._staleness = staleness

    def push(self, worker: int, samples: int, version: int) -> Update | None:
        update = Update(self._rounds[worker], {worker: 1.0}) if samples else None
        self._rounds[worker] += 1
        if update is not None:
            self.pushes.staleness[self.version - version] += 1
            self.version += 1
        return update

    def _may_answer(self, worker: int) -> bool:
        return self._rounds[worker] - self.rounds_done <= self._staleness


class SynchronousProtocol(Protocol):
    """The gradients of a round are one update: their mean over all samples.

    A round is over when all workers, or all but `backup`, have pushed. Gradients that come later
    are dropped. A worker whose round is over before it has the weights starts the next round.
    """

    def __init__(self, workers: int, backup: int) -> None:
        super().__init__(workers)
        self._needed = workers - backup
        self._round = 0
        self._arrived: dict[int, int] = {}

    def push(self, worker: int, samples: int, version: int) -> Update | None:
        late = self._rounds[worker] < self._round
        self._rounds[worker] += 1
        if late:
            self.pushes.dropped += samples > 0
            return None
        self._arrived[worker] = samples
        if samples:
            self.pushes.staleness[0] += 1
        return self._end_round() if len(self._arrived) == self._needed else None

    def _end_round(self) -> Update | None:
        arrived, self._arrived = self._arrived, {}
        number, self._round = self._round, self._round + 1
        total = sum(arrived.values())
        if not total:
            return None
        self.version += 1
        return Update(number, {w: arrived[w] / total for w in sorted(arrived) if arrived[w]})

    def _may_answer(self, worker: int) -> bool:
        return self._rounds[worker] <= self._round

    def _is_late(self, worker: int) -> bool:
        return self._rounds[worker] < self._round
