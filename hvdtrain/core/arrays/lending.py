"""Gradients of arrays that are read where the framework has allocated them."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.arrays import HostArray
from hvdtrain.buffer import Buffer, Elements
from hvdtrain.collective import collective
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.allocators.arena import LEAST_BYTES, GradientArena, blocks_for
from hvdtrain.core.allocators.opening import FindLibrary, open_places, suitable_slices
from hvdtrain.core.gradients.plan import BucketPlan
from hvdtrain.core.places.lent_bucket import LentBucket
from hvdtrain.core.places.places import GradientPlaces

# Addresses at which kernels read fastest.
_ALIGNMENT_BYTES = 64


class Lending:
    """Finds gradients of a plan that lie in memory of the node (all local)."""

    def __init__(self, arena: GradientArena, places: GradientPlaces, plan: BucketPlan) -> None:
        self._arena, self._places, self._plan = arena, places, plan

    def buckets(self, buffers: Sequence[Buffer]) -> list[LentBucket | None]:
        """Return each bucket for a step; None for those of small gradients."""
        specs, base = self._plan.specs, self._places.offset(buffers[0])
        return [
            None
            if all(specs[index].nbytes < LEAST_BYTES for index in layout.parameters)
            else LentBucket(
                self._places,
                {
                    index: (start, specs[index].count)
                    for index, start in zip(layout.parameters, layout.starts, strict=True)
                },
                buffer,
                base,
            )
            for layout, buffer in zip(self._plan.buckets, buffers, strict=True)
        ]

    def lend(self, bucket: LentBucket | None, index: int, array: HostArray) -> bool:
        """Let other ranks read a gradient where it lies; return whether they can."""
        spec = self._plan.specs[index]
        if bucket is None or spec.nbytes < LEAST_BYTES:
            return False
        if array.dtype != spec.dtype.numpy or not array.flags.c_contiguous:
            return False
        address = array.ctypes.data
        offset = self._arena.offset(address)
        if offset is None:
            self._arena.miss(address)
            return False
        if offset % _ALIGNMENT_BYTES:
            return False
        bucket.lend(index, address, offset)
        return True


@collective
def open_lending(
    channel: Channel, plan: BucketPlan, memory: Elements, find: FindLibrary, name: str
) -> Lending | None:
    """Let a framework allocate gradients in memory of the node, if all ranks can."""
    if suitable_slices(channel, memory) is None:
        return None
    sizes = [spec.nbytes for spec in plan.specs if spec.dtype.value == spec.kind]
    blocks = blocks_for(sizes)
    opened = open_places(channel, memory, blocks, len(plan.specs), find, name)
    return None if opened is None else Lending(*opened, plan)
