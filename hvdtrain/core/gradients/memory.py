"""Allocation of the memory of buckets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from hvdtrain.buffer import Buffer, Elements
from hvdtrain.collective import collective
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.collectives.memory import AllocateMemory
from hvdtrain.core.gradients.plan import Bucket, BucketPlan

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
        device: channel.run(AllocateMemory(nbytes, f"of {name} on {device}", devices[device]))
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
