"""Weights in memory that the other ranks of the node write."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdtrain.buffer import Buffer
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.collectives.memory import AllocateMemory
from hvdtrain.core.gradients.plan import ParameterSpec
from hvdtrain.core.sharding.segments import Segment
from hvdtrain.engines.slices import Slices
from hvdtrain.errors import UnsupportedError
from hvdtrain.torch.tensors.buffers import as_buffer, from_buffer

_ALIGNMENT_BYTES = 128


class WeightMemory:
    """The weights of this rank in shared memory, and those of the others as accessed here.

    Each rank has its own copy of all weights. `p.data` becomes a view of the memory.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        specs: Sequence[ParameterSpec],
        slices: Slices,
        channel: Channel,
        name: str,
    ) -> None:
        _check_memory(parameters, specs)
        self._parameters, self._specs = parameters, specs
        starts, end = [], 0
        for spec in specs:
            starts.append(end)
            end += -(-spec.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        memory = channel.run(AllocateMemory(max(1, end), f"of weights of {name}"))
        copies = slices.copies(memory)
        self.shared = copies is not None
        if copies is None:
            return
        buffers = [
            [
                Buffer.of(copy[start : start + spec.nbytes]).view(spec.dtype)
                for start, spec in zip(starts, specs, strict=True)
            ]
            for copy in copies
        ]
        self._own, self._number = buffers[slices.number], slices.number
        self._others = [copy for rank, copy in enumerate(buffers) if rank != slices.number]
        self._elements = [from_buffer(buffer) for buffer in self._own]
        self.follow()

    def follow(self) -> None:
        """Move weights into the memory whose parameter has another one, with their values."""
        for parameter, own, spec in zip(self._parameters, self._own, self._specs, strict=True):
            if parameter.data_ptr() == own.pointer or not spec.count:
                continue
            weights = parameter.detach()
            # Not of `_elements`, which would move with p.data.share_memory_().
            view = from_buffer(own).as_strided(spec.shape, spec.strides)
            if weights.shape != view.shape or weights.dtype != view.dtype or not weights.is_cpu:
                raise UnsupportedError(
                    f"sharded=True: parameter {spec.name!r} was {view.dtype} {tuple(view.shape)} "
                    f"on the CPU and is {weights.dtype} {tuple(weights.shape)} on {weights.device} "
                    "now: wrap the optimizer again"
                )
            view.copy_(weights)
            parameter.data = view

    def segment(self, segment: Segment) -> torch.Tensor:
        """Return this rank's elements of a segment, 1-d."""
        elements = self._elements[segment.parameter]
        return elements[segment.first : segment.first + segment.count]

    def addresses(self, segment: Segment) -> list[int]:
        """Return the address of a segment on each rank, as accessed here, this rank's first."""
        first = segment.first * self._specs[segment.parameter].dtype.itemsize
        copies = [self._own, *self._others]
        return [buffers[segment.parameter].pointer + first for buffers in copies]

    def places(self, segment: Segment) -> list[tuple[Buffer, Buffer]]:
        """Return this rank's elements of a segment with their place on each other rank."""
        own = as_buffer(self.segment(segment))
        return [
            (own, buffers[segment.parameter].slice(segment.first, segment.count))
            for buffers in self._others
        ]


def _check_memory(parameters: Sequence[torch.nn.Parameter], specs: Sequence[ParameterSpec]) -> None:
    """Check that nothing else refers to the memory of the parameters, which they leave."""
    owners: dict[int, str] = {}
    for parameter, spec in zip(parameters, specs, strict=True):
        if spec.device != "cpu" or spec.dtype.value != spec.kind:
            raise UnsupportedError(
                f"sharded=True: parameter {spec.name!r} is {spec.kind} on {spec.device}, and only "
                "parameters on the CPU whose gradients are reduced in their own type can be "
                "shared: use sharded=False"
            )
        storage = parameter.untyped_storage()
        other = owners.setdefault(storage.data_ptr(), spec.name) if spec.count else spec.name
        if other != spec.name or storage.nbytes() != spec.nbytes:
            what = "a larger tensor" if other == spec.name else f"parameter {other!r}"
            raise UnsupportedError(
                f"sharded=True: parameter {spec.name!r} shares its memory with {what}, but "
                "weights move to memory of the node: give it memory of its own, p.data = "
                "p.data.clone(), or use sharded=False"
            )
