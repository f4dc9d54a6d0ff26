"""Memory of the node in which a framework allocates gradients (all local)."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from hvdtrain.core.allocators.build import AllocatorError
from hvdtrain.core.allocators.library import Blocks, Library

# Smaller gradients are copied into their buckets: they stay in the caches until they are added.
LEAST_BYTES = 64 << 10


def blocks_for(sizes: Iterable[int]) -> Blocks | None:
    """Return the blocks that gradients need; None if all of them are small.

    There is one more of each size than gradients, for what is added to one that exists.

    Args:
        sizes: bytes of each gradient.
    """
    counts = Counter(size for size in sizes if size >= LEAST_BYTES)
    return Blocks({size: count + 1 for size, count in counts.items()}) if counts else None


class GradientArena:
    """Memory that serves allocations of the size of gradients.

    It serves them while this object exists. What was allocated stays valid.
    """

    def __init__(self, library: Library, memory: npt.NDArray[np.uint8], blocks: Blocks) -> None:
        handle = library.open(memory.ctypes.data, blocks)
        if handle is None:
            raise AllocatorError("the system does not map shared memory a second time (mremap)")
        self._library, self._handle = library, handle
        self._base, self._nbytes = library.base(handle), blocks.nbytes
        weakref.finalize(self, library.close, handle)

    @property
    def used(self) -> int:
        """Number of blocks in use."""
        return self._library.used(self._handle)

    def prefer(self) -> None:
        """Serve allocations before the arenas of other optimizers with gradients of equal size."""
        self._library.prefer(self._handle)

    def miss(self, address: int) -> None:
        """Say that a gradient lies elsewhere, so that the next ones may be served."""
        self._library.learn(address)
        self.prefer()  # another arena with blocks of this size may have served it

    def offset(self, address: int) -> int | None:
        """Return the offset of an address in the memory; None if it is outside."""
        offset = address - self._base
        return offset if 0 <= offset < self._nbytes else None
