"""The bucket plan: which gradients are reduced together, and in which order (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from math import prod
from typing import Any

from hvdtrain.buffer import Buffer, Elements
from hvdtrain.collective import collective
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.collectives.gathers import allocate
from hvdtrain.types import DType

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
