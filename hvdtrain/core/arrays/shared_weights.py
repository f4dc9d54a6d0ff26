"""Memory in which owners write new weights, where the variables of all ranks keep them."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.arrays import HostArray
from hvdtrain.core.arrays.memory import MemoryPool
from hvdtrain.core.gradients.memory import cut
from hvdtrain.core.gradients.plan import Bucket
from hvdtrain.core.process_set import ProcessSet
from hvdtrain.core.sharding.segments import Segment
from hvdtrain.engines.slices import Slices

# Variables keep the weights of a step while those of the next one are written.
_BLOCKS = 2
_ALIGNMENT_BYTES = 4096


def node_slices(process_set: ProcessSet) -> Slices | None:
    """Return the slices of memory that the ranks of a node share."""
    if not process_set.included() or process_set.size() == 1:
        return None
    slices = process_set.channel().communicator.slices()
    return slices if slices is not None and slices.owners > 1 else None


def places_of(
    buckets: Sequence[Bucket], memories: Sequence[HostArray], segments: Sequence[Segment]
) -> list[list[HostArray]]:
    """Return the place of each segment in the memory of each rank, [count] each."""
    ranks = [cut(buckets, {"cpu": memory}) for memory in memories]
    return [
        [buffers[each.bucket].slice(each.start, each.count).array() for buffers in ranks]
        for each in segments
    ]


class NewWeights:
    """Memory of the node for the new weights of this rank (all local).

    Odd and even steps have a block each. A variable without a gradient, or a program that keeps
    tensors, may keep a block for longer.

    Args:
        memories: [memory_bytes(nbytes)] uint8 of each rank of the node.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        memories: Sequence[HostArray],
        number: int,
        owned: Sequence[Segment],
        nbytes: int,
    ) -> None:
        turns = [
            [memory.reshape(_BLOCKS, -1)[turn, :nbytes] for memory in memories]
            for turn in range(_BLOCKS)
        ]
        self._pools = [MemoryPool(parts[number]) for parts in turns]
        self._places = [places_of(buckets, parts, owned) for parts in turns]

    @staticmethod
    def memory_bytes(nbytes: int) -> int:
        """Return the memory that each rank needs for buckets of this size in all."""
        return _BLOCKS * (-(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)

    def take(self, step: int) -> tuple[HostArray, bool]:
        """Return memory for this rank's weights, and whether other ranks may write there.

        Returns:
            uint8 [nbytes], in use as long as views of it exist; private memory if a tensor still
            refers to the block of this step.
        """
        pool = self._pools[step % _BLOCKS]
        block = pool.allocate()
        return block, pool.is_given(block)

    def places(self, step: int) -> list[list[HostArray]]:
        """Return the place of each owned segment in the block of each rank, [count] each."""
        return self._places[step % _BLOCKS]
