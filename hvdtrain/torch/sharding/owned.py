"""The segments of parameters that one rank owns, and steps of torch's optimizers on them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from hvdtrain.buffer import Buffer
from hvdtrain.core.sharding.segments import segments_of
from hvdtrain.engines.slices import Slices
from hvdtrain.torch.gradients.buckets import ParameterBuckets
from hvdtrain.torch.sharding.segment_optimizer import like, take_settings
from hvdtrain.torch.sharding.state_memory import StateMemory, in_memory_order
from hvdtrain.torch.sharding.weight_memory import WeightMemory
from hvdtrain.torch.tensors.buffers import from_buffer

__all__ = ["OwnedSegments"]


class OwnedSegments:
    """Weights and gradients of the segments of this rank by one plan (all local).

    Args:
        optimizer: optimizer of the user.
        buckets: buckets of its parameters.
        slices: slices of the buckets.
        weights: memory of the weights.

    Attributes:
        of_all: segments of each owner.
        segments: segments of this rank by their parameter's index.
        tensors: weights of the segments, 1-d, likewise.
        groups: number of each segment's parameter group, likewise.
        optimizer: optimizer like that of the user, on the segments.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        buckets: ParameterBuckets,
        slices: Slices,
        weights: WeightMemory,
    ) -> None:
        self._user, self._buckets, self._weights = optimizer, buckets, weights
        self._parameters = [parameter for _, parameter in buckets.named]
        self.of_all = segments_of(buckets.plan, slices.owners)
        owned = self.of_all[slices.number] if slices.number < slices.owners else []
        self.segments = {segment.parameter: segment for segment in owned}
        self.tensors = {s.parameter: weights.segment(s) for s in owned}
        memory = [from_buffer(buffer) for buffer in buckets.reducer.buffers]
        self._gradients = {
            s.parameter: memory[s.bucket][s.start : s.start + s.count] for s in owned
        }
        indices = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        chosen: list[tuple[dict[str, Any], list[int]]] = [
            (group, [i for p in group["params"] if (i := indices.get(id(p))) in self.segments])
            for group in optimizer.param_groups
        ]
        self.groups = {i: number for number, (_, own) in enumerate(chosen) for i in own}
        pairs = [(group, [self.tensors[i] for i in own]) for group, own in chosen]
        self.optimizer = like(optimizer, pairs)

    def follow(self) -> None:
        """Follow the user's weights and settings, which the program may have changed."""
        self._weights.follow()
        take_settings(self.optimizer, self._user.param_groups)

    def used(self) -> list[int]:
        """Return the indices of this rank's parameters that have a gradient."""
        return [i for i in self.segments if self._parameters[i].grad is not None]

    def gradient(self, index: int, kept: bool = False) -> torch.Tensor:
        """Return the part of a reduced gradient that belongs to this rank, 1-d.

        Args:
            index: index of the parameter.
            kept: whether all ranks have the reduced gradients, so that the program may have
                replaced this one.
        """
        gradient, segment = self._parameters[index].grad, self.segments[index]
        if not kept or gradient is None or self._buckets.views.holds(index):
            return self._gradients[index]
        elements = in_memory_order(gradient, self._buckets.plan.specs[index])
        return elements[segment.first : segment.first + segment.count]

    def gradients(self) -> list[torch.Tensor]:
        """Return the parts of all reduced gradients that belong to this rank."""
        return [self._gradients[index] for index in self.used()]

    def step(
        self, state: StateMemory, left: Collection[int], kept: bool
    ) -> list[tuple[Buffer, Buffer]]:
        """Step on the segments whose parameters have gradients.

        Args:
            state: memory of the state.
            left: parameters that are stepped on otherwise.
            kept: as for gradient().

        Returns:
            Weights that have changed, and their places on the other ranks.
        """
        states: Mapping[torch.Tensor, Any] = self.optimizer.state
        used = [index for index in self.used() if index not in left]
        # Some of torch's optimizers take no parameters with and without state together.
        for wanted in (True, False):
            chosen = [i for i in used if bool(states.get(self.tensors[i])) is wanted]
            if chosen:
                self._step_on(chosen, kept)
        for index in used:
            state.keep(index, states.get(self.tensors[index], {}))
        return [pair for i in used for pair in self._weights.places(self.segments[i])]

    def _step_on(self, chosen: Sequence[int], kept: bool) -> None:
        for tensor in self.tensors.values():
            tensor.grad = None
        for index in chosen:
            self.tensors[index].grad = self.gradient(index, kept)
        self.optimizer.step()
