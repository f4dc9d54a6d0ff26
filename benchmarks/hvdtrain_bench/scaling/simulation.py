"""What agreement, stall watch and recovery take on many ranks, which are simulated."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.config import Config
from hvdtrain.core.agreement.channel import Channel, Stopwatch
from hvdtrain.core.agreement.lifecycle import last_to_join
from hvdtrain.core.agreement.operation import Operation
from hvdtrain.core.allreduce import Allreduce
from hvdtrain.core.membership import Context, answer_with_zeros
from hvdtrain.core.recovery import open_next
from hvdtrain.core.stall import StallSettings, StallWarnings, StallWatch, Wait, pending_on
from hvdtrain.engines.communicator import Communicator, EngineWorld
from hvdtrain.errors import MismatchError
from hvdtrain.topology import Topology
from hvdtrain.types import ReduceOp
from hvdtrain_bench.scaling.paper import Cluster
from hvdtrain_bench.scaling.simulated_network import (
    BrokenRulesError,
    Clocks,
    Group,
    Numbers,
    SimulatedCommunicator,
    SimulatedJob,
)


def _channel(communicator: Communicator) -> Channel:
    title = "[simulated]"
    return Channel(communicator, range(communicator.size), title, answer_with_zeros, "world")


class Player:
    """The program of a rank: it submits operations, and checks what becomes of them."""

    def __init__(self, communicator: Communicator, role: int, roles: Sequence[int]) -> None:
        self.channel, self.role, self._roles = _channel(communicator), role, roles
        self._operations: dict[str, tuple[Operation, Buffer]] = {}
        self.ends: dict[str, str] = {}

    @collective
    def submit(self, name: str, count: int = 1) -> None:
        """Submit a sum of `count` numbers."""
        buffer = Buffer.from_array(np.full(count, float(self.role + 1)))
        operation = Allreduce([buffer], [(count,)], ReduceOp.SUM, name)
        self._operations[name] = operation, buffer
        self.channel.submit(operation)

    @collective
    def wait(self, name: str, without: int = -1) -> None:
        """Wait for a sum, over all ranks but those of one role."""
        operation, buffer = self._operations.pop(name)
        try:
            self.channel.wait(operation)
        except MismatchError:
            self.ends[name] = "differs"
            return
        expected = sum(role + 1 for role in self._roles if role != without)
        if (buffer.array() != expected).any():
            raise BrokenRulesError(f"{name} is {buffer.array()} instead of {expected}")
        self.ends[name] = "done"

    @collective
    def sum(self, name: str, count: int = 1, without: int = -1) -> None:
        self.submit(name, count)
        self.wait(name, without)

    @collective
    def join(self) -> None:
        order = self.channel.wait(self.channel.join())
        self.ends["join"] = f"rank {last_to_join([order])} was the last"

    @collective
    def leave(self) -> None:
        self.channel.wait(self.channel.leave())
        if self.channel.queue.operations():
            raise BrokenRulesError("operations are pending when all ranks have left")


@collective
def _one(player: Player) -> None:
    player.sum("a")


@collective
def _in_other_orders(player: Player) -> None:
    for name in "ab" if player.role else "ba":
        player.submit(name)
    for name in "ab":
        player.wait(name)


@collective
def _overlapping(player: Player) -> None:
    """Begin with an operation that other ranks submit only after a common one."""
    own, other = ("a", "b") if player.role else ("b", "a")
    player.submit(own)
    player.sum("c")
    player.submit(other)
    for name in "ab":
        player.wait(name)


@collective
def _differing(player: Player) -> None:
    player.sum("a", count=2 if player.role else 1)


@collective
def _joined(player: Player) -> None:
    if not player.role:
        player.sum("a", without=1)
    player.join()


def _odd(rank: int, size: int) -> int:
    return rank % 2


def _last(rank: int, size: int) -> int:
    return int(rank == size - 1)


# What ranks do, and the role of each.
PROGRAMS: Mapping[str, tuple[Callable[[Player], None], Callable[[int, int], int]]] = {
    "one all-reduce": (_one, lambda rank, size: 0),
    "two, in other orders": (_in_other_orders, _odd),
    "three, which overlap": (_overlapping, _odd),
    "one that differs": (_differing, _last),
    "one without a rank that has joined": (_joined, _last),
}


def player_of(name: str, communicator: Communicator) -> Player:
    """Return what plays one of PROGRAMS on this rank."""
    role_of, size = PROGRAMS[name][1], communicator.size
    roles = [role_of(rank, size) for rank in range(size)]
    return Player(communicator, roles[communicator.rank], roles)


@dataclass(frozen=True)
class Found:
    """What ranks took: calls of the engine with bytes, and seconds of the simulated clocks."""

    calls: Sequence[tuple[str, int]]
    seconds: float
    result: str

    @property
    def votes(self) -> int:
        return sum(name == "start_max" for name, _ in self.calls)

    @property
    def nbytes(self) -> int:
        """The bytes of the results of all calls, each of which every rank receives."""
        return sum(nbytes for _, nbytes in self.calls)


class _Ranks:
    """Ranks of a job that begin within some milliseconds; those of one role are one class."""

    def __init__(self, cluster: Cluster, roles: Sequence[int], seed: int, late: float = 0.0):
        spread = np.random.default_rng(seed).exponential(_SPREAD_SECONDS, len(roles))
        spread[-1] += late
        self.began: Clocks = spread
        self.job = SimulatedJob(cluster, spread.copy(), seed)
        self.nodes = [rank // cluster.ranks_per_node for rank in range(len(roles) + 1)]
        found = np.array(roles)
        self.classes = [np.flatnonzero(found == role) for role in dict.fromkeys(roles)]
        self.group = Group(self.job, np.arange(len(roles)), self.classes)

    def advance(self, members: Numbers, seconds: float) -> None:
        self.job.clocks[members] += seconds

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """Call a function for each class; if one fails, the others do so, too."""

        def run(number: int) -> Any:
            try:
                return function(number)
            except BaseException:
                self.group.leave()
                raise

        with ThreadPoolExecutor(len(self.classes)) as pool:
            runs = [pool.submit(run, number) for number in range(len(self.classes))]
        errors = [error for each in runs if (error := each.exception()) is not None]
        errors.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))
        if errors:
            raise errors[0]
        return [each.result() for each in runs]

    def found(self, calls: Sequence[tuple[str, int]], ended: float, result: object) -> Found:
        return Found(calls, float(ended - self.began.max()), str(result))


_SPREAD_SECONDS = 1e-3  # mean


def simulate_operation(
    name: str, cluster: Cluster, size: int, seed: int = 0, late_seconds: float = 0.0
) -> Found:
    """Run one of PROGRAMS; seconds are those from when the last rank begins, which may be late."""
    program, role_of = PROGRAMS[name]
    ranks = _Ranks(cluster, [role_of(rank, size) for rank in range(size)], seed, late_seconds)
    job = ranks.job

    def run(number: int) -> tuple[dict[str, str], int, float]:
        members = ranks.classes[number]
        player = player_of(name, SimulatedCommunicator(ranks.group, number))
        queue, back_off = player.channel.queue, player.channel.queue.back_off

        def back_off_here() -> None:
            ranks.advance(members, queue._back_off_seconds)
            back_off()

        queue.back_off = back_off_here  # type: ignore[method-assign]
        program(player)
        ranks.advance(members, job.computed())
        calls, ended = len(job.calls), float(job.clocks[members].max())
        player.leave()
        return player.ends, calls, ended

    ends, calls, ended = zip(*ranks.run(run), strict=True)
    for operation in set().union(*ends):
        how = {own[operation] for own in ends if operation in own}
        if len(how) > 1:
            raise BrokenRulesError(f"{operation} has ended in different ways: {how}")
    return ranks.found(job.calls[: calls[0]], max(ended), ends[0])


class _Warnings(StallWarnings):
    """Keeps the first report, and what had been called until then."""

    def __init__(self, settings: StallSettings, topology: Topology, found: Callable[[str], Found]):
        super().__init__(settings, topology, lambda _: None, lambda _: None)
        self._found, self.first, self.told = found, list[Found](), threading.Event()

    def _say(self, text: str) -> None:
        if not self.told.is_set():
            self.first.append(self._found(text))
            self.told.set()


class _Watch(StallWatch):
    """A stall watch that waits by the clocks of its ranks."""

    def __init__(self, advance: Callable[[float], None], *arguments: Any) -> None:
        self._advance = advance
        super().__init__(*arguments)

    def _rest(self, seconds: float) -> None:
        self._advance(seconds)

    def _result_of(self, function: Callable[[], Any]) -> Any:
        return function()


_PERIOD_SECONDS, _POLL_SECONDS = 60.0, 0.05  # as in Config and in hvdtrain.core.stall
_LONGEST_SECONDS = 600.0


def simulate_stall(cluster: Cluster, size: int, seed: int = 0) -> Found:
    """Let one rank not submit what all others wait for, until rank 0 names it."""
    ranks = _Ranks(cluster, [_last(rank, size) for rank in range(size)], seed)
    settings = StallSettings(_PERIOD_SECONDS, float("inf"), stacks=False)

    def watch(number: int) -> tuple[_Watch, _Warnings]:
        members, job = ranks.classes[number], ranks.job
        first = int(members[0])
        channel = _channel(SimulatedCommunicator(ranks.group, number))
        if number == 0:
            zero = Buffer.from_array(np.zeros(1))
            channel.submit(Allreduce([zero], [(1,)], ReduceOp.SUM, "loss"))

        def pending() -> list[Wait]:
            seconds = float(job.clocks[first])
            return [replace(wait, seconds=seconds) for wait in pending_on([channel], Stopwatch())]

        def found(text: str) -> Found:
            gathers = [call for call in job.calls if call[0] == "allgather"]
            return ranks.found(gathers, job.clocks[first], text)

        topology = Topology.from_nodes(first, ranks.nodes[:size], [""] * size)
        warnings = _Warnings(settings, topology, found)
        communicator = SimulatedCommunicator(ranks.group, number, _POLL_SECONDS)
        how = (communicator, settings, topology, pending, warnings)
        return _Watch(lambda seconds: ranks.advance(members, seconds), *how), warnings

    watches, warnings = zip(*map(watch, range(len(ranks.classes))), strict=True)
    if not warnings[0].told.wait(_LONGEST_SECONDS):
        raise BrokenRulesError("nobody is named")
    for one in watches:
        one.stop()
    found: Found = warnings[0].first[0]
    return found


def hosts_of(nodes: Sequence[int]) -> tuple[str, ...]:
    return tuple(f"node{node:05}" for node in nodes)


def _one_lost(communicator: SimulatedCommunicator, nodes: Sequence[int]) -> Any:
    """Return the Failures of ranks that the last one has left."""
    failures: Any = SimpleNamespace(lost=tuple, check=lambda: None, revoke=lambda: None)
    failures.agree = lambda value: communicator.enter("agree", own=value)

    def reopen(newcomer: None) -> EngineWorld:
        communicator.enter("reopen")
        world = EngineWorld("mpi", "", communicator, tuple(nodes), hosts_of(nodes), failures)
        return replace(world, before=tuple(range(len(nodes))))

    failures.reopen = reopen
    return failures


class _Optimizer:
    """What is compared of an optimizer, which has taken as many steps on all ranks."""

    steps = 1

    def interrupt(self) -> None: ...


_WATCH_SECONDS = 0.1  # within which hvdtrain.core.membership.FailureWatch notices that a rank ended


def simulate_recovery(cluster: Cluster, size: int, seed: int = 0) -> Found:
    """Let the last rank end, and all others go on, with an optimizer."""
    left = size - 1
    ranks = _Ranks(cluster, [int(rank > 0) for rank in range(left)], seed)
    nodes, hosts = ranks.nodes[:size], hosts_of(ranks.nodes[:size])

    def run(number: int) -> tuple[int, ...]:
        communicator = SimulatedCommunicator(ranks.group, number)
        failures = _one_lost(communicator, nodes[:left])
        topology = Topology.from_nodes(communicator.rank, nodes, hosts)
        # The world that is left is only closed.
        alone = SimulatedCommunicator(Group(ranks.job, np.arange(1), [np.arange(1)]), 0)
        channel = Channel(alone, range(size), topology.title, answer_with_zeros, "world")
        config, failed = Config(stall_seconds=0), lambda _: None
        before = Context(config, "mpi", "", topology, channel, failed, failures=failures)
        optimizer: Any = _Optimizer()
        before.followers.add(optimizer, channel.ranks)
        ranks.job.computed()
        here, recovery = open_next(before, failures, lambda *_: None)
        ranks.advance(ranks.classes[number], ranks.job.computed())
        if here.failure_watch is not None:
            here.failure_watch.stop()
        if (here.topology.size, here.world.ranks) != (left, list(range(left))):
            raise BrokenRulesError(f"{here.topology.size} ranks are left of {size}")
        return recovery.lost

    lost = set(ranks.run(run))
    if lost != {(left,)}:
        raise BrokenRulesError(f"{lost} are lost instead of rank {left}")
    return ranks.found(ranks.job.calls, ranks.job.clocks.max() + _WATCH_SECONDS, f"without {left}")


Scenario = Callable[[Cluster, int, int], Found]


def _of_program(name: str, late_seconds: float = 0.0) -> Scenario:
    return lambda cluster, size, seed: simulate_operation(name, cluster, size, seed, late_seconds)


SCENARIOS: Mapping[str, Scenario] = {
    **{name: _of_program(name) for name in PROGRAMS},
    "one all-reduce, last rank 0.1 s late": _of_program("one all-reduce", 0.1),
    "naming a rank that is missing for 60 s": simulate_stall,
    "going on without a rank that has ended": simulate_recovery,
}
