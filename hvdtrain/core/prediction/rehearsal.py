"""Rehearsals of exchanges without a network: how long they compute, and what they would send."""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from statistics import mean
from types import MappingProxyType
from typing import NoReturn

import numpy as np

from hvdtrain.arrays import elements_of, like, to_host
from hvdtrain.buffer import Buffer
from hvdtrain.core.gradients.communicators import Communicators
from hvdtrain.core.gradients.exchange import Exchange, FilledBucket, StepInfo
from hvdtrain.core.gradients.plan import Bucket, ParameterSpec
from hvdtrain.engines.communicator import Capabilities, Communicator
from hvdtrain.errors import UnsupportedError
from hvdtrain.types import ReduceOp

# The first run does not count: it has no residual, and touches new memory. All others do, because
# a computation that is short may have a core for itself although ranks have to share them.
_RUNS, _SECONDS = 2, 0.005
_SAMPLE_ELEMENTS = 1 << 16
# Of a parameter whose time is that of calls and not of elements.
_SMALL = (64, 64)


@dataclass(frozen=True)
class Rehearsed:
    """What an exchange does for one gradient.

    Attributes:
        seconds: computation.
    """

    seconds: float
    nbytes: float
    calls: int


class _NoNetwork(Communicator):
    """The communicator of one rank among others that are not there: it counts and sends nothing.

    Attributes:
        seconds: time spent here.
    """

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
    while len(runs) <= _RUNS or sum(runs[1:]) < _SECONDS:
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
