"""Gradients that are reduced where autograd made them, in memory that a node's ranks share."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from hvdtrain.buffer import Buffer, Elements
from hvdtrain.core import context
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.collectives.memory import AllocateIfWanted
from hvdtrain.core.gradients.exchange import Exchange
from hvdtrain.core.gradients.plan import BucketPlan
from hvdtrain.core.places.placed_bucket import PlacedBucket
from hvdtrain.core.places.places import GradientPlaces
from hvdtrain.engines.slices import Slices
from hvdtrain.torch.allocator.arena import LEAST_BYTES, GradientArena, blocks_for
from hvdtrain.torch.allocator.build import AllocatorError
from hvdtrain.torch.allocator.library import Blocks
from hvdtrain.torch.allocator.trial import Allocator, find_allocator, why_no_allocator
from hvdtrain.torch.gradients.settings import ParameterSettings
from hvdtrain.torch.operations.compression import Compression
from hvdtrain.torch.tensors.buffers import is_plain

__all__ = ["StayingGradients", "open_staying", "placed_of"]

_logger = logging.getLogger("hvdtrain")


class StayingGradients:
    """Decides which gradients are reduced where they are (all local).

    Args:
        allocator: allocator of the gradients.
        arena: its memory.
        places: places of the gradients of all ranks.
    """

    def __init__(self, allocator: Allocator, arena: GradientArena, places: GradientPlaces) -> None:
        self._allocator, self.arena, self.places = allocator, arena, places

    def admit(
        self,
        index: int,
        parameter: torch.Tensor,
        incoming: torch.Tensor | None,
        part: torch.Tensor,
    ) -> bool:
        """Say where the gradient of a parameter lies, if other ranks can use it there.

        Args:
            index: index of the parameter.
            parameter: parameter with a gradient.
            incoming: as in count_references().
            part: its part of the bucket.

        Returns:
            Whether they can; else it has to be copied to that part.
        """
        address = _address(parameter.grad, part)
        if address is None or part.nbytes < LEAST_BYTES:
            return False
        offset = self.arena.offset(address)
        if offset is None:  # the last backward pass was that of another optimizer
            self.arena.prefer()
            return False
        if not self._allocator.is_alone(parameter, incoming):
            return False
        self.places.put(index, offset)
        return True

    def dismiss(self, index: int) -> None:
        """Say that the gradient of a parameter is in its bucket."""
        self.places.put(index, None)


def _address(gradient: torch.Tensor | None, part: torch.Tensor) -> int | None:
    """Return the address of a gradient that is like its part of the bucket; None for others."""
    if gradient is None or gradient.layout is not torch.strided or gradient.requires_grad:
        return None
    like = gradient.dtype == part.dtype and gradient.stride() == part.stride()
    return gradient.data_ptr() if like and is_plain(gradient) else None


def open_staying(
    channel: Channel,
    plan: BucketPlan,
    exchange: Exchange,
    memory: Mapping[str, Elements],
    settings: ParameterSettings,
    name: str,
) -> StayingGradients | None:
    """Let autograd allocate gradients in memory that the ranks share, if all can (collective).

    Args:
        channel: channel of the plan.
        plan: bucket plan.
        exchange: exchange of the buckets.
        memory: memory of the buckets by device.
        settings: settings, equal on all ranks.
        name: name of the plan.
    """
    slices = channel.communicator.slices()
    if slices is None or slices.owners == 1 or not slices.adds_placed or set(memory) != {"cpu"}:
        return None
    if slices.copies(memory["cpu"]) is None:
        return None
    # Ranks whose exchanges differ find that out in the first step.
    suitable = exchange.in_place and settings.compressor is Compression.none
    return _open(channel, plan, slices, memory["cpu"], name, suitable)


def placed_of(
    staying: StayingGradients | None, plan: BucketPlan, buffers: Sequence[Buffer]
) -> list[PlacedBucket | None]:
    """Return each bucket of a plan of which some gradients may stay; None for the others.

    Args:
        staying: result of open_staying().
        plan: bucket plan.
        buffers: memory of each bucket.
    """
    return [
        None
        if staying is None or all(plan.specs[i].nbytes < LEAST_BYTES for i in layout.parameters)
        else PlacedBucket(
            staying.places,
            {
                index: (start, plan.specs[index].count)
                for index, start in zip(layout.parameters, layout.starts, strict=True)
            },
            buffer,
        )
        for layout, buffer in zip(plan.buckets, buffers, strict=True)
    ]


def _open(
    channel: Channel,
    plan: BucketPlan,
    slices: Slices,
    memory: Elements,
    name: str,
    suitable: bool,
) -> StayingGradients | None:
    blocks = blocks_for(spec.nbytes for spec in plan.specs if spec.dtype.value == spec.kind)
    if blocks is None:
        return None
    # The first rank compiles the allocator if that has not been done, and then the others find it.
    wanted = suitable and (slices.number != 0 or _wanted() is not None)
    shared = channel.run(AllocateIfWanted(blocks.nbytes, f"of the gradients of {name}", wanted))
    if not isinstance(shared, np.ndarray) or slices.copies(shared) is None:
        return None
    allocator = _wanted()
    arena = None if allocator is None else _open_arena(allocator, shared, blocks)
    count = len(plan.specs)
    table_bytes = GradientPlaces.table_bytes(count)
    table = channel.run(
        AllocateIfWanted(table_bytes, f"of the places of {name}", arena is not None)
    )
    if allocator is None or arena is None or table is None or slices.copies(table) is None:
        return None
    places = GradientPlaces(slices, memory, shared, table, count)
    return StayingGradients(allocator, arena, places)


def _open_arena(
    allocator: Allocator, shared: npt.NDArray[np.uint8], blocks: Blocks
) -> GradientArena | None:
    try:
        return GradientArena(allocator.library, shared, blocks)
    except AllocatorError as error:
        _logger.info("gradients are copied into their buckets: %s", error)
        return None


def _wanted() -> Allocator | None:
    """Return the allocator, unless the user or its trial has decided against it (local)."""
    if not context.current().config.torch_allocator:
        return None
    allocator = find_allocator()
    if allocator is None:
        _logger.debug("gradients are copied into buckets: %s", why_no_allocator())
    return allocator
