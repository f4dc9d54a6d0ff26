"""Measurements of this machine for the cost model, on which all ranks agree."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from statistics import mean, median
from types import MappingProxyType
from typing import NoReturn

import numpy as np

from hvdtrain.arrays import elements_of, like, to_host
from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core.exchanges.costs import Measured, as_in_steps
from hvdtrain.core.gradients.communicators import Communicators
from hvdtrain.core.gradients.exchange import Exchange, FilledBucket, StepInfo
from hvdtrain.core.gradients.plan import (
    AllreduceCost,
    Bucket,
    BucketPlan,
    ParameterSpec,
    fit_cost,
    measure_allreduces,
)
from hvdtrain.engines.communicator import Capabilities, Communicator
from hvdtrain.errors import UnsupportedError
from hvdtrain.types import DType, ReduceOp

_SECONDS = 0.02
# Elements of a piece of work, which numpy computes without Python's lock in about 100 us.
_PIECE_ELEMENTS = 1 << 14


@collective
def core_share(threads: int, meet: Callable[[], None]) -> float:
    """Return what a computation takes of the cores on which a program computes.

    Both are measured alone and together, on all ranks at the same time:

        c = (1 - program together / program alone) / (other together / other alone)

    It is 0 if there are spare cores, and 1 if the program takes longer by the whole computation.
    """
    other = _speed(0, 1, meet)[1]
    program = _speed(threads, 0, meet)[0]
    slower_program, slower_other = _speed(threads, 1, meet)
    lost = (1 - slower_program / program) / (slower_other / other)
    return min(1.0, max(0.0, lost))


@collective
def _speed(threads: int, others: int, meet: Callable[[], None]) -> tuple[float, float]:
    """Return the speed of threads of the program together, and of the other ones."""
    meet()
    end = time.perf_counter() + _SECONDS
    done = [0.0] * (threads + others)

    def work(number: int) -> None:
        values = np.ones(_PIECE_ELEMENTS)
        began, pieces = time.perf_counter(), 0
        while pieces == 0 or time.perf_counter() < end:  # at least one, however late it begins
            np.sin(values, out=values)
            pieces += 1
        done[number] = pieces / (time.perf_counter() - began)

    workers = [threading.Thread(target=work, args=[number]) for number in range(len(done))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(done[:threads]), sum(done[threads:])


# The first run does not count: it has no residual, and touches new memory. All others do, because
# a computation that is short may have a core for itself although ranks have to share them.
_RUNS, _REHEARSAL_SECONDS = 2, 0.005
_SAMPLE_ELEMENTS = 1 << 16
# Shape of a parameter whose time is that of calls, not of elements.
_SMALL = (64, 64)


@dataclass(frozen=True)
class Rehearsed:
    """What an exchange does for one gradient."""

    seconds: float
    nbytes: float
    calls: int


class _NoNetwork(Communicator):
    """The communicator of one rank among others that are not there: it counts and sends nothing."""

    capabilities = Capabilities(MappingProxyType({}), frozenset(), frozenset(), concurrent=False)

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.nbytes, self.calls, self.seconds = 0.0, 0, 0.0

    def allreduce(
        self, buffer: Buffer, op: ReduceOp, prescale: float = 1.0, postscale: float = 1.0
    ) -> None:
        self.nbytes += buffer.nbytes
        self.calls += 1

    def allgather(self, send: Buffer, receive: Buffer, counts: Sequence[int]) -> None:
        self._receive(send, receive, counts)

    def alltoall(
        self,
        send: Buffer,
        receive: Buffer,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
    ) -> None:
        self._receive(send, receive, receive_counts)

    def _receive(self, send: Buffer, receive: Buffer, counts: Sequence[int]) -> None:
        """Fill memory with copies of what this rank sends, which is like what others send."""
        began = time.perf_counter()
        first = 0
        while first < receive.count and send.count:
            part = min(send.count, receive.count - first)
            receive.slice(first, part).copy_from(send.slice(0, part))
            first += part
        others = sum(counts) - counts[self.rank]
        # An all-reduce moves 2 (n - 1) / n of its bytes.
        self.nbytes += others * send.dtype.itemsize * self.size / (2 * (self.size - 1))
        self.calls += 1
        self.seconds += time.perf_counter() - began

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise UnsupportedError(
            f"[rank {self.rank}/{self.size}] a rehearsed exchange may only call allreduce, "
            "allgather and alltoall of the network: leave it out of those allowed"
        )

    broadcast = reduce_scatter = start_max = barrier = split = empty = close = abort = _refuse


def rehearse(exchange: Exchange, spec: ParameterSpec, memory: Buffer, nodes: int) -> Rehearsed:
    """Return what an exchange does for the gradient of a parameter."""
    exchange = deepcopy(exchange)
    buffer = memory.like(spec.count)
    elements = elements_of(buffer)
    sample = np.random.default_rng(0).standard_normal(_SAMPLE_ELEMENTS).astype(np.float32)
    values = like(np.resize(sample, spec.count), elements)
    layout = Bucket((0,), (0,), spec.count, spec.dtype, spec.device)
    bucket = FilledBucket(0, buffer, layout, (spec,))
    runs: list[float] = []
    while len(runs) <= _RUNS or sum(runs[1:]) < _REHEARSAL_SECONDS:
        elements[...] = values
        to_host(elements[:1])  # waits for a device
        network, info = _NoNetwork(0, nodes), StepInfo(len(runs), nodes)
        began = time.perf_counter()
        exchange.reduce(bucket, info, Communicators.flat(network))
        exchange.end(info)
        to_host(elements[:1])
        runs.append(time.perf_counter() - began - network.seconds)
    return Rehearsed(mean(runs[1:]), network.nbytes, network.calls)


def small(spec: ParameterSpec) -> ParameterSpec:
    """Return a small parameter of the same type, whose time is that of calls."""
    return replace(spec, shape=_SMALL, strides=(_SMALL[1], 1))


class StepTimes:
    """Times of the steps since the last clear(), apart from the first step of all."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._ready: list[list[float]] = []
        self._reduced: list[list[float]] = []
        self._filled: list[float] = []
        self._reducing: list[float] = []
        self._ended: float | None = None

    def clear(self) -> None:
        self.seconds, self._ready, self._reduced = [], [], []
        self._filled, self._reducing = [], []

    def note_bucket(self, filled: float, seconds: float) -> None:
        """Note when the next bucket of the step was filled, and how long its reduction took."""
        self._filled.append(filled)
        self._reducing.append(seconds)

    def end_step(self, when: float) -> None:
        if self._ended is not None:
            start = self._ended
            self.seconds.append(when - start)
            self._ready.append([filled - start for filled in self._filled])
            self._reduced.append(self._reducing)
        self._ended, self._filled, self._reducing = when, [], []

    def ready_seconds(self) -> Sequence[float]:
        """Return the median time of each bucket, after the end of the step before."""
        return [median(times) for times in zip(*self._ready, strict=True)]

    def reduced_seconds(self) -> Sequence[float]:
        """Return the median time of the reduction of each bucket."""
        return [median(times) for times in zip(*self._reduced, strict=True)]

    def median_seconds(self) -> float:
        return median(self.seconds)


# Sizes of all-reduces, calls of each, and the time that the larger sizes must not exceed.
_SIZES_BYTES, _CALLS, _BUDGET_SECONDS = (4 << 10, 1 << 20, 4 << 20), 5, 1.0
# Other programs may disturb a measurement so much that times do not grow with size.
_TRIES = 3

# Type and device of a gradient's bucket.
Place = tuple[DType, str]
# Parameters of equal shape cost the same.
_Shape = tuple[Place, tuple[int, ...], tuple[int, ...]]

_NOTHING = AllreduceCost(0.0, float("inf"))
_IDLE = Rehearsed(0.0, 0.0, 0)
_TOO_NOISY = AllreduceCost(float("inf"), float("inf"))


def place_of(spec: ParameterSpec) -> Place:
    return spec.dtype, spec.device


@dataclass(frozen=True)
class Measurement:
    """A measurement that all ranks carry out together."""

    exchanges: Mapping[str, Exchange]
    plan: BucketPlan
    memory: Mapping[Place, Buffer]
    times: StepTimes
    threads: int

    @collective
    def run(self, communicators: Communicators) -> Measured:
        """Measure the links and rehearse the exchanges; return the slowest of all."""
        network = communicators.network
        nodes = 0 if network is None else network.size
        links = [_link(network), _link(communicators.node)]
        shapes = list(dict.fromkeys(map(_shape, self.plan.specs)))
        meet = communicators.all_ranks.barrier
        on_host = all(device == "cpu" for _, device in self.memory)
        rehearsed = []
        specs = {_shape(spec): spec for spec in self.plan.specs}
        for exchange in self.exchanges.values():
            for spec in (small(self.plan.specs[0]), *(specs[shape] for shape in shapes)):
                meet()  # so that all ranks rehearse it at the same time
                memory = self.memory[place_of(spec)]
                rehearsed.append(rehearse(exchange, spec, memory, nodes) if nodes else _IDLE)
        numbers = [
            float(nodes),
            # A device computes one thing at a time.
            core_share(self.threads, meet) if on_host else 1.0,
            self.times.median_seconds(),
            *(n for link in links for n in (link.latency_seconds, 1 / link.bytes_per_second)),
            *self.times.ready_seconds(),
            # The least of all: other ranks wait for the last one.
            *(-seconds for seconds in self.times.reduced_seconds()),
            *(n for each in rehearsed for n in (each.seconds, each.nbytes, float(each.calls))),
        ]
        slowest = np.array(numbers, np.float64)
        communicators.all_ranks.allreduce(Buffer.from_array(slowest), ReduceOp.MAX)
        return self._measured(slowest.tolist(), shapes, communicators.owners)

    def _measured(
        self, numbers: Sequence[float], shapes: Sequence[_Shape], owners: int
    ) -> Measured:
        """Return the numbers that all ranks have agreed on in their places."""
        nodes, share, step_seconds, *links = numbers[:7]
        end = 7 + len(self.plan.buckets)
        ready, reduced = numbers[7:end], numbers[end : 2 * end - 7]
        # Of each exchange that of calls, and of each shape, and their three numbers.
        costs = np.array(numbers[2 * end - 7 :]).reshape(len(self.exchanges), 1 + len(shapes), 3)
        start = costs[:, 0, 0]
        of_gradients = costs[:, [1 + shapes.index(_shape(spec)) for spec in self.plan.specs]]
        measured = Measured(
            int(nodes),
            owners,
            AllreduceCost(links[0], _inverse(links[1])),
            AllreduceCost(links[2], _inverse(links[3])),
            ready,
            list(self.exchanges),
            costs[:, 1:, 2].max(1).tolist(),
            start.tolist(),
            np.maximum(0.0, of_gradients[..., 0] - start[:, None]),
            of_gradients[..., 1],
            share,
        )
        if not measured.valid:
            return measured
        return as_in_steps(measured, self.plan, -sum(reduced), step_seconds)


def _shape(spec: ParameterSpec) -> _Shape:
    return place_of(spec), spec.shape, spec.strides


@collective
def _link(communicator: Communicator | None) -> AllreduceCost:
    if communicator is None or communicator.size == 1:
        return _NOTHING
    for _ in range(_TRIES):  # as many on all members, who have the same times
        points = measure_allreduces(communicator, _SIZES_BYTES, _CALLS, _BUDGET_SECONDS)
        with suppress(ValueError):
            return fit_cost(points)
    return _TOO_NOISY


def _inverse(slowness: float) -> float:
    return 1 / slowness if slowness else float("inf")
