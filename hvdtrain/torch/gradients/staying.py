"""Gradients that are reduced where autograd made them, in memory that a node's ranks share."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch

from hvdtrain.buffer import Buffer, Elements
from hvdtrain.collective import collective
from hvdtrain.core import context
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.allocators.arena import LEAST_BYTES, GradientArena, blocks_for
from hvdtrain.core.allocators.library import Library
from hvdtrain.core.allocators.opening import open_places, suitable_slices
from hvdtrain.core.gradients.exchange import Exchange
from hvdtrain.core.gradients.plan import BucketPlan
from hvdtrain.core.places.placed_bucket import PlacedBucket
from hvdtrain.core.places.places import GradientPlaces
from hvdtrain.torch.allocator.trial import Allocator, find_allocator, why_no_allocator
from hvdtrain.torch.gradients.settings import ParameterSettings
from hvdtrain.torch.operations.compression import Compression
from hvdtrain.torch.tensors.buffers import is_plain

_logger = logging.getLogger("hvdtrain")


class StayingGradients:
    """Decides which gradients are reduced where they are (all local)."""

    def __init__(self, allocator: Allocator, arena: GradientArena, places: GradientPlaces) -> None:
        self._allocator, self.arena, self.places = allocator, arena, places

    def admit(
        self,
        index: int,
        parameter: torch.Tensor,
        incoming: torch.Tensor | None,
        part: torch.Tensor,
    ) -> bool:
        """Say where the gradient of a parameter lies, if other ranks can use it there."""
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


@collective
def open_staying(
    channel: Channel,
    plan: BucketPlan,
    exchange: Exchange,
    memory: Mapping[str, Elements],
    settings: ParameterSettings,
    name: str,
) -> StayingGradients | None:
    """Let autograd allocate gradients in memory that the ranks share, if all can."""
    if set(memory) != {"cpu"} or suitable_slices(channel, memory["cpu"]) is None:
        return None
    # Ranks whose exchanges differ find that out in the first step.
    suitable = exchange.in_place and settings.compressor is Compression.none
    blocks = blocks_for(spec.nbytes for spec in plan.specs if spec.dtype.value == spec.kind)

    def find() -> Library | None:
        allocator = _wanted() if suitable else None
        return None if allocator is None else allocator.library

    opened = open_places(channel, memory["cpu"], blocks, len(plan.specs), find, name)
    allocator = _wanted()
    if opened is None or allocator is None:
        return None
    return StayingGradients(allocator, *opened)


def placed_of(
    staying: StayingGradients | None, plan: BucketPlan, buffers: Sequence[Buffer]
) -> list[PlacedBucket | None]:
    """Return each bucket of a plan of which some gradients may stay; None for the others."""
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


def _wanted() -> Allocator | None:
    """Return the allocator, unless the user or its trial has decided against it."""
    if not context.current().config.torch_allocator:
        return None
    allocator = find_allocator()
    if allocator is None:
        _logger.debug("gradients are copied into buckets: %s", why_no_allocator())
    return allocator
