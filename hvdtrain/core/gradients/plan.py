"""The bucket plan: which gradients are reduced together, in which order, and how many at most."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from math import prod
from typing import Any

import numpy as np

from hvdtrain.buffer import Buffer, Elements
from hvdtrain.collective import collective
from hvdtrain.config import DEFAULT_BUCKET_BYTES
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.agreement.operation import Request, Work
from hvdtrain.core.gathers import allocate
from hvdtrain.engines.communicator import Communicator
from hvdtrain.types import DType, ReduceOp

# The name of the operation that ranks agree on for each step of a plan.
STEP = "optimizer step"

_CALLED = {"kind": "dtype"}


@dataclass(frozen=True)
class ParameterSpec:
    """The properties of a parameter that must be equal on all ranks."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    kind: str
    device: str

    @classmethod
    def of_array(cls, name: str, shape: Sequence[int], dtype: str, kind: str) -> ParameterSpec:
        """Return the spec of a contiguous array in host memory."""
        strides = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
        return cls(name, tuple(shape), strides, DType(dtype), kind, "cpu")

    @property
    def count(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize


@dataclass(frozen=True)
class Bucket:
    """Gradients of one type and device in contiguous memory."""

    parameters: tuple[int, ...]
    starts: tuple[int, ...]
    count: int
    dtype: DType
    device: str = "cpu"

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize


@dataclass(frozen=True)
class BucketPlan:
    """Buckets in the order in which they are reduced."""

    specs: tuple[ParameterSpec, ...]
    buckets: tuple[Bucket, ...]
    bucket_bytes: int
    first_bucket_bytes: int
    groups: tuple[tuple[int, ...], ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)

    @cached_property
    def bucket_of(self) -> dict[int, int]:
        """The number of each parameter's bucket, by index of the parameter."""
        return {i: number for number, bucket in enumerate(self.buckets) for i in bucket.parameters}

    @cached_property
    def digest(self) -> str:
        return blake2b(repr(self).encode(), digest_size=8).hexdigest()

    @property
    def layout(self) -> dict[str, Any]:
        """The plan without its parameters, as plain data; see plan_of_layout()."""
        return {
            "buckets": [list(bucket.parameters) for bucket in self.buckets],
            "bucket_bytes": self.bucket_bytes,
            "first_bucket_bytes": self.first_bucket_bytes,
        }


def make_plan(
    specs: Sequence[ParameterSpec],
    bucket_bytes: int,
    first_bucket_bytes: int,
    groups: Sequence[Sequence[int]] = (),
    order: Sequence[int] | None = None,
    apart: Set[int] = frozenset(),
) -> BucketPlan:
    """Divide parameters, in the order of their gradients, into buckets of one type and device.

    The first bucket is small so that communication starts early. A bucket is closed when the next
    gradient would exceed its maximum size; a gradient larger than that gets its own bucket.
    """
    order = list(order or reversed(range(len(specs))))
    position = {index: number for number, index in enumerate(order)}
    grouped = [sorted(members, key=position.__getitem__) for members in groups]
    taken = {index for members in grouped for index in members}
    closed: list[list[int]] = []
    open_buckets: dict[tuple[DType, str, bool], list[int]] = {}
    for index in order:
        if index in taken:
            continue
        spec = specs[index]
        key = (spec.dtype, spec.device, index in apart)
        bucket = open_buckets.setdefault(key, [])
        limit = bucket_bytes if closed else first_bucket_bytes
        if bucket and sum(specs[i].nbytes for i in bucket) + spec.nbytes > limit:
            closed.append(bucket)
            open_buckets[key] = bucket = []
        bucket.append(index)
    # An open bucket is complete when its last gradient is.
    closed += [bucket for members in grouped for bucket in _by_kind(specs, members)]
    closed += open_buckets.values()
    if len(closed) > 1:
        closed.sort(key=lambda bucket: position[bucket[-1]])
    buckets = tuple(_bucket(specs, members) for members in closed)
    kept = tuple(tuple(members) for members in groups)
    return BucketPlan(tuple(specs), buckets, bucket_bytes, first_bucket_bytes, kept)


def plan_of_layout(plan: BucketPlan, layout: Mapping[str, Any]) -> BucketPlan:
    """Return a plan with a given layout for the parameters of another plan."""
    try:
        buckets, limits = layout["buckets"], (layout["bucket_bytes"], layout["first_bucket_bytes"])
        indices = sorted(index for members in buckets for index in members)
        kinds = [_by_kind(plan.specs, members) for members in buckets]
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"this is no bucket plan of these parameters: {error!r}") from error
    if indices != list(range(len(plan.specs))) or any(len(kind) != 1 for kind in kinds):
        raise ValueError(
            f"this bucket plan does not contain each of {len(plan.specs)} parameters once, in "
            "buckets of one type: it belongs to another model"
        )
    return BucketPlan(
        plan.specs, tuple(_bucket(plan.specs, m) for m in buckets), *limits, plan.groups
    )


def _by_kind(specs: Sequence[ParameterSpec], members: Sequence[int]) -> list[list[int]]:
    kinds: dict[tuple[DType, str], list[int]] = {}
    for index in members:
        kinds.setdefault((specs[index].dtype, specs[index].device), []).append(index)
    return list(kinds.values())


def _bucket(specs: Sequence[ParameterSpec], members: Sequence[int]) -> Bucket:
    starts, count = [], 0
    for index in members:
        starts.append(count)
        count += specs[index].count
    first = specs[members[0]]
    return Bucket(tuple(members), tuple(starts), count, first.dtype, first.device)


def first_difference(
    own: Sequence[ParameterSpec], root: Sequence[ParameterSpec], root_rank: int = 0
) -> str | None:
    """Return the first difference between the parameters of two ranks, or None."""
    for mine, theirs in zip(own, root, strict=False):
        if mine.name != theirs.name:
            return f"parameter {mine.name!r}, but rank {root_rank} has {theirs.name!r} in its place"
        for what in ("shape", "kind", "strides", "device"):
            here, there = getattr(mine, what), getattr(theirs, what)
            if here != there:
                called = _CALLED.get(what, what)
                return f"parameter {mine.name!r}: {called} {here}, but rank {root_rank} has {there}"
    if len(own) != len(root):
        return f"{len(own)} parameters, but rank {root_rank} has {len(root)}"
    return None


# Buckets are aligned so that two of them never share a cache line.
_ALIGNMENT_BYTES = 128


def memory_bytes(plan: BucketPlan) -> dict[str, int]:
    """Return how many bytes any plan of the same gradients needs, by device."""
    sizes: Counter[str] = Counter()
    for spec in plan.specs:
        sizes[spec.device] += spec.nbytes + _ALIGNMENT_BYTES
    return dict(sizes)


@collective
def bucket_memory(
    channel: Channel, plan: BucketPlan, name: str, devices: Mapping[str, str]
) -> dict[str, Elements]:
    """Allocate memory that the engine reduces fastest, for each device of a plan."""
    return {
        device: channel.run(allocate(nbytes, f"of {name} on {device}", devices[device]))
        for device, nbytes in sorted(memory_bytes(plan).items())
    }


def cut(buckets: Sequence[Bucket], memory: Mapping[str, Elements]) -> list[Buffer]:
    """Divide memory into buckets."""
    whole = {device: Buffer.of(elements) for device, elements in memory.items()}
    buffers, ends = [], dict.fromkeys(memory, 0)
    for bucket in buckets:
        start = ends[bucket.device]
        buffers.append(whole[bucket.device].slice(start, bucket.nbytes).view(bucket.dtype))
        ends[bucket.device] = start + -(-bucket.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return buffers


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
