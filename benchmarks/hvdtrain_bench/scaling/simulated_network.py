"""Ranks of one process whose clocks are computed: one thread for all ranks that do the same.

A communicator lets the threads meet, does what a primitive does, and moves the clock of each rank
along the trees of Open MPI 5:

    votes     Iallreduce: a binomial tree to rank 0, and another one from there
    reports   Allgatherv: Bruck's algorithm below 4 KiB of each rank, else neighbors in turn
    tensors   see paper.allreduce_seconds

A message takes the latency of its link and a jitter, which is exponential. In a vote, a rank sees
it only when it looks for it next. What the code of a rank computes is measured, and counts, too.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdtrain.buffer import Buffer
from hvdtrain.engines.communicator import Communicator, Pending, pause_seconds
from hvdtrain.engines.local import LocalCommunicator
from hvdtrain.errors import HvdtrainError
from hvdtrain.types import ReduceOp
from hvdtrain_bench.scaling.paper import Cluster, allreduce_seconds

Clocks = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]

_JITTER = 0.2  # mean, as a share of the latency
_LEAST_FOR_NEIGHBORS = 4096  # bytes of each rank
_SPIN_SECONDS, _LONG_SECONDS = 1e-6, 1.0

# What `reopen` of the mpi engine takes: MPI_Comm_shrink three times, each an agreement and three
# votes on the number of the communicator, and seven other agreements; nodes, hosts and libraries of
# all ranks, and two MPI_Comm_split; two requests of each rank to mpirun.
REOPEN_VOTES, REOPEN_GATHERS, REOPEN_BYTES = 19, 9, 100
REQUEST_SECONDS = 100e-6


def _looks() -> Clocks:
    """Return when a rank looks that waits in `poll_until`."""
    looks = [0.0]
    while looks[-1] < _LONG_SECONDS:
        looks.append(looks[-1] + (pause_seconds(looks[-1]) or _SPIN_SECONDS))
    return np.array(looks)


_LOOKS = _looks()
_LAST_PAUSE = pause_seconds(_LONG_SECONDS)


def seen(entered: Clocks, arrived: Clocks, period: float = 0.0) -> Clocks:
    """Return when ranks see what has arrived: every `period` seconds, or else by `poll_until`."""
    waited = np.maximum(arrived - entered, 0.0)
    if period:
        return entered + np.ceil(waited / period) * period
    places = np.minimum(np.searchsorted(_LOOKS, waited), len(_LOOKS) - 1)
    beyond: Clocks = np.ceil(np.maximum(waited - _LOOKS[-1], 0.0) / _LAST_PAUSE) * _LAST_PAUSE
    return entered + beyond + _LOOKS[places]


def tree_steps(ranks: int) -> Iterator[tuple[Numbers, Numbers]]:
    """Yield who sends to whom in an Iallreduce of few bytes, in the order of the steps."""
    steps = [1 << power for power in range((ranks - 1).bit_length())]
    for step in steps:
        parents = np.arange(0, ranks - step, 2 * step)
        yield parents + step, parents
    for step in steps:
        children = np.arange(step, min(2 * step, ranks))
        yield children - step, children


class BrokenRulesError(Exception):
    """Ranks have done what the protocol excludes."""


@dataclass
class SimulatedJob:
    """The ranks of a job: their clocks in seconds, and the calls of the engine that all made."""

    cluster: Cluster
    clocks: Clocks
    seed: int = 0
    calls: list[tuple[str, int]] = field(default_factory=list)  # primitives, and their bytes

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)
        self._threads = threading.local()

    def computed(self) -> float:
        """Return for how long this thread has computed since it asked last."""
        before = getattr(self._threads, "before", None)
        self._threads.before = now = time.thread_time()
        return 0.0 if before is None else now - before

    def vote(self, ranks: Numbers, nbytes: int, period: float) -> None:
        entered, clocks = self.clocks[ranks], self.clocks[ranks]
        for senders, receivers in tree_steps(len(ranks)):
            arrived = clocks[senders] + self._delays(ranks[senders], ranks[receivers], nbytes)
            known = np.maximum(clocks[receivers], arrived)
            clocks[receivers] = seen(entered[receivers], known, period)
        self.clocks[ranks] = clocks

    def _delays(self, senders: Numbers, receivers: Numbers, nbytes: int) -> Clocks:
        width, network = self.cluster.ranks_per_node, self.cluster.network
        within = self.cluster.node or network
        inside = senders // width == receivers // width
        latency = np.where(inside, within.latency_seconds, network.latency_seconds)
        rate = np.where(inside, within.bytes_per_second, network.bytes_per_second)
        return latency * (1 + self._random.exponential(_JITTER, len(senders))) + nbytes / rate

    def meet(self, ranks: Numbers, seconds: float) -> None:
        """Have all ranks continue together, so many seconds after the last has come."""
        self.clocks[ranks] = self.clocks[ranks].max() + seconds

    def gather_seconds(self, ranks: int, nbytes: int) -> float:
        """Return how long an allgather takes whose result has `nbytes`; a card is shared."""
        network, sharers = self.cluster.network, self.cluster.on_node(ranks)
        few = nbytes < _LEAST_FOR_NEIGHBORS * ranks
        steps = (ranks - 1).bit_length() if few else ranks // 2
        latency = network.latency_seconds * (1 + _JITTER)
        return steps * latency + nbytes * sharers / network.bytes_per_second


@dataclass
class _Call:
    primitive: str
    equal: tuple[object, ...] = ()
    own: Any = None
    period: float = 0.0
    result: Any = None


class Group:
    """The members of a communicator, by class: `classes` has their positions."""

    def __init__(self, job: SimulatedJob, ranks: Numbers, classes: Sequence[Numbers]) -> None:
        self.job, self.ranks, self.classes = job, ranks, classes
        self.calls: list[_Call] = [_Call("")] * len(classes)
        self.class_of = np.empty(len(ranks), np.int64)
        for number, members in enumerate(classes):
            self.class_of[members] = number
        self._barrier = threading.Barrier(len(classes), self._meet)

    def enter(self, number: int, call: _Call) -> Any:
        self.job.clocks[self.ranks[self.classes[number]]] += self.job.computed()
        self.calls[number] = call
        self._barrier.wait()
        self.job.computed()
        return call.result

    def leave(self) -> None:
        """Have the others fail that wait for this class."""
        self._barrier.abort()

    def _meet(self) -> None:
        """Do what a primitive does, from the arguments of all classes."""
        first, job, size = self.calls[0], self.job, len(self.ranks)
        if any((c.primitive, c.equal) != (first.primitive, first.equal) for c in self.calls):
            raise BrokenRulesError(f"ranks are in different calls: {self.calls}")
        nbytes = 0
        match first.primitive:
            case "start_max":
                nbytes = first.own.nbytes
                highest = np.maximum.reduce([call.own for call in self.calls])
                for call in self.calls:
                    call.own[:] = highest
                job.vote(self.ranks, nbytes, first.period)
            case "allreduce":
                nbytes = first.own.nbytes
                counts = [len(members) for members in self.classes]
                pairs = zip(counts, self.calls, strict=True)
                total = sum(count * call.own.array() for count, call in pairs)
                for call in self.calls:
                    call.own.array()[:] = total
                job.meet(self.ranks, allreduce_seconds(size, nbytes, job.cluster.network))
            case "allgather":
                parts = [call.own[0].array() for call in self.calls]
                whole = np.concatenate([parts[number] for number in self.class_of])
                nbytes = whole.nbytes
                for call in self.calls:
                    call.own[1].array()[:] = whole
                job.meet(self.ranks, job.gather_seconds(size, nbytes))
            case "agree":
                agreed = all(call.own for call in self.calls)
                for call in self.calls:
                    call.result = agreed
                job.vote(self.ranks, 4, 0.0)
            case "reopen":
                for _ in range(REOPEN_VOTES):
                    job.vote(self.ranks, 4, 0.0)
                gathers = REOPEN_GATHERS * job.gather_seconds(size, REOPEN_BYTES * size)
                job.meet(self.ranks, gathers + 2 * size * REQUEST_SECONDS)
            case "split":
                chosen = np.array(first.equal, np.int64)
                kept = [np.flatnonzero(np.isin(chosen, members)) for members in self.classes]
                child = Group(job, self.ranks[chosen], [own for own in kept if len(own)])
                for call in self.calls:
                    call.result = child
                job.meet(self.ranks, job.gather_seconds(size, 8 * size))
        job.calls.append((first.primitive, nbytes))


class _Started(Pending):
    def __init__(self, complete: Callable[[float], None], period: float) -> None:
        self._complete, self._period = complete, period

    def test(self) -> bool:
        self._complete(self._period)
        return True

    def wait(self) -> None:
        self._complete(0.0)


class SimulatedCommunicator(Communicator):
    """The communicator of a class, which acts as the first of its ranks."""

    capabilities = replace(LocalCommunicator.capabilities, concurrent=False)

    def __init__(self, group: Group, number: int, test_period: float = 0.0) -> None:
        self.group, self._number, self._test_period = group, number, test_period
        self.rank, self.size = int(group.classes[number][0]), len(group.ranks)

    def enter(self, primitive: str, equal: tuple[object, ...] = (), own: Any = None) -> Any:
        return self.group.enter(self._number, _Call(primitive, equal, own))

    def start_max(self, values: npt.NDArray[np.uint64]) -> Pending:
        def complete(period: float) -> None:
            call = _Call("start_max", (values.size, period), values, period)
            self.group.enter(self._number, call)

        return _Started(complete, self._test_period)

    def allreduce(
        self, buffer: Buffer, op: ReduceOp, prescale: float = 1.0, postscale: float = 1.0
    ) -> None:
        if op is not ReduceOp.SUM or (prescale, postscale) != (1.0, 1.0):
            raise HvdtrainError(f"simulated ranks add, and do nothing else: {op}")
        self.enter("allreduce", (buffer.dtype, buffer.count), buffer)

    def allgather(self, send: Buffer, receive: Buffer, counts: Sequence[int]) -> None:
        self.enter("allgather", (tuple(counts),), (send, receive))

    def split(self, ranks: Sequence[int]) -> SimulatedCommunicator | None:
        child: Group = self.enter("split", tuple(ranks))
        if self.rank not in ranks:
            return None
        number = int(child.class_of[bisect_left(ranks, self.rank)])
        return SimulatedCommunicator(child, number, self._test_period)

    def _refuse(self, *_: Any) -> Any:
        raise NotImplementedError

    broadcast: Any = _refuse
    alltoall: Any = _refuse
    abort: Any = _refuse
    barrier: Any = _refuse

    def close(self) -> None: ...
