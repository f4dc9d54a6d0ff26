"""How the ranks of a node begin to reduce gradients where a framework's allocations lie."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from hvdtrain.buffer import Elements
from hvdtrain.collective import collective
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.allocators.arena import GradientArena
from hvdtrain.core.allocators.build import AllocatorError
from hvdtrain.core.allocators.library import Blocks, Library
from hvdtrain.core.collectives.memory import AllocateIfWanted
from hvdtrain.core.places.places import GradientPlaces
from hvdtrain.engines.slices import Slices

_logger = logging.getLogger("hvdtrain")

# Returns the calls of an allocator, compiled on the first call; None if there is none, or the user
# has decided against it.
FindLibrary = Callable[[], Library | None]


def placing_slices(channel: Channel) -> Slices | None:
    """Return slices of memory that is shared later, as suitable_slices() would."""
    slices = channel.communicator.slices()
    if slices is None or slices.owners == 1 or not slices.adds_placed:
        return None
    return slices


def suitable_slices(channel: Channel, memory: Elements) -> Slices | None:
    """Return the slices of memory, if gradients that lie elsewhere can be added there."""
    slices = placing_slices(channel)
    return slices if slices is not None and slices.copies(memory) is not None else None


@collective
def open_places(
    channel: Channel,
    memory: Elements,
    blocks: Blocks | None,
    parameters: int,
    find: FindLibrary,
    name: str,
) -> tuple[GradientArena, GradientPlaces] | None:
    """Serve allocations from memory of the node, if all ranks can."""
    slices = suitable_slices(channel, memory)
    if blocks is None or slices is None:
        return None
    # The first rank compiles the allocator if that has not been done, and then the others find it.
    wanted = slices.number != 0 or find() is not None
    shared = channel.run(AllocateIfWanted(blocks.nbytes, f"of the gradients of {name}", wanted))
    if not isinstance(shared, np.ndarray) or slices.copies(shared) is None:
        return None
    arena = _open_arena(find(), shared, blocks)
    nbytes = GradientPlaces.table_bytes(parameters)
    table = channel.run(AllocateIfWanted(nbytes, f"of the places of {name}", arena is not None))
    if arena is None or table is None or slices.copies(table) is None:
        return None
    return arena, GradientPlaces(slices, memory, shared, table, parameters)


def _open_arena(
    library: Library | None, shared: npt.NDArray[np.uint8], blocks: Blocks
) -> GradientArena | None:
    if library is None:
        return None
    try:
        return GradientArena(library, shared, blocks)
    except AllocatorError as error:
        _logger.info("gradients are copied into their buckets: %s", error)
        return None
