"""Bucket size: large enough that latency is a small part of an all-reduce."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.config import DEFAULT_BUCKET_BYTES
from hvdtrain.core.agreement.operation import Request, Work
from hvdtrain.engines.communicator import Communicator
from hvdtrain.types import DType, ReduceOp

# Buckets smaller than the first one have no advantage; larger ones leave too little to overlap.
_LEAST_BYTES, _MOST_BYTES = 1 << 20, 64 << 20
_LATENCY_SHARE = 0.05


@dataclass(frozen=True)
class AllreduceCost:
    """The cost model of an all-reduce: latency_seconds + bytes / bytes_per_second."""

    latency_seconds: float
    bytes_per_second: float

    def seconds(self, nbytes: float) -> float:
        return self.latency_seconds + nbytes / self.bytes_per_second


@dataclass(frozen=True)
class BucketSize:
    """The maximum size of a bucket."""

    nbytes: int
    reason: str


def fit_cost(points: Sequence[tuple[int, float]]) -> AllreduceCost:
    """Return latency and bandwidth, fitted to bytes and seconds of measured all-reduces.

    The smallest size gives the latency. The bandwidth is the least-squares slope of the other
    sizes relative to it, so that the largest ones weigh most, as they do in a step.
    """
    (_, start), *larger = sorted(points)
    products = sum(nbytes * (seconds - start) for nbytes, seconds in larger)
    if products <= 0 or start <= 0:
        raise ValueError(f"these times do not grow with size: {sorted(points)}")
    return AllreduceCost(start, sum(nbytes * nbytes for nbytes, _ in larger) / products)


def choose_bucket_size(points: Sequence[tuple[int, float]]) -> BucketSize:
    """Return the size at which latency is 5 % of an all-reduce, between 1 and 64 MiB.

        latency / (latency + bytes / bandwidth) = 0.05

    The size is rounded up to a power of two, so that noise in the measurement seldom changes it
    from run to run. It is the default if the points allow no fit.
    """
    try:
        cost = fit_cost(points)
    except ValueError:
        return BucketSize(DEFAULT_BUCKET_BYTES, "the default: the measurement was too noisy")
    wanted = cost.latency_seconds * cost.bytes_per_second * (1 / _LATENCY_SHARE - 1)
    within = min(max(wanted, _LEAST_BYTES), _MOST_BYTES)
    microseconds, gigabytes = 1e6 * cost.latency_seconds, cost.bytes_per_second / 1e9
    return BucketSize(
        1 << (int(within) - 1).bit_length(),
        f"measured: an all-reduce starts in {microseconds:.0f} us and runs at {gigabytes:.3g} GB/s",
    )


def size_text(nbytes: int) -> str:
    """Return a size in readable form, e.g. "25 MiB"."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} bytes"


_SIZES_BYTES = (4 << 10, 64 << 10, 1 << 20, 4 << 20)
_CALLS = 10
_BUDGET_SECONDS = 0.05


def measuring() -> Work:
    """Measure all-reduces in the engine's memory, for about 50 ms at most.

    The result, equal on all members, is a list of sizes in bytes and the times of the slowest
    member in seconds. Over a slow network only the smaller sizes are measured, but at least two.
    """
    limits = _SIZES_BYTES, _CALLS, _BUDGET_SECONDS
    return Work(Request("measuring all-reduces"), lambda c: measure_allreduces(c, *limits))


@collective
def measure_allreduces(
    communicator: Communicator, sizes: Sequence[int], calls: int, budget_seconds: float
) -> list[tuple[int, float]]:
    """Return at least two of the sizes in bytes, and times of the slowest member in seconds."""
    # A communicator releases its memory only when it is closed.
    own = communicator.split(range(communicator.size))
    assert own is not None  # every member is in it
    whole = Buffer.of(own.empty(sizes[-1])).view(DType.FLOAT32)
    whole.zero()
    points: list[tuple[int, float]] = []
    spent = 0.0
    for nbytes in sizes:
        if len(points) > 1:
            last_bytes, last_seconds = points[-1]
            if spent + calls * last_seconds * nbytes / last_bytes > budget_seconds:
                break
        part = whole.slice(0, nbytes // whole.dtype.itemsize)
        shortest, together = _time_calls(own, part, calls)
        points.append((nbytes, shortest))
        spent += together
    own.close()
    return points


def _time_calls(communicator: Communicator, buffer: Buffer, calls: int) -> list[float]:
    """Return the times of the least disturbed and of all calls, each on the slowest member."""
    times = []
    for _ in range(calls):
        began = time.perf_counter()
        communicator.allreduce(buffer, ReduceOp.SUM)
        times.append(time.perf_counter() - began)
    slowest = np.array([min(times), sum(times)])
    communicator.allreduce(Buffer.from_array(slowest), ReduceOp.MAX)
    seconds: list[float] = slowest.tolist()
    return seconds
