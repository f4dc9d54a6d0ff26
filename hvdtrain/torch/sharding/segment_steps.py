"""Steps of an optimizer on the segments of parameters that a rank owns (all local)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from hvdtrain.core.sharding.segments import Segment
from hvdtrain.torch.gradients.buckets import ParameterBuckets
from hvdtrain.torch.sharding.segment_optimizer import like, take_settings
from hvdtrain.torch.sharding.state_memory import in_memory_order

_Entry = dict[str, Any]


class SegmentSteps:
    """An optimizer like the user's, with segments in place of parameters."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        buckets: ParameterBuckets,
        owned: Mapping[int, Segment],
        tensors: Mapping[int, torch.Tensor],
    ) -> None:
        self._buckets, self.owned, self._tensors = buckets, owned, tensors
        self._parameters = [parameter for _, parameter in buckets.named]
        indices = {id(self._parameters[index]): index for index in owned}
        groups = optimizer.param_groups
        chosen = [[indices[id(p)] for p in g["params"] if id(p) in indices] for g in groups]
        self.groups = {index: number for number, own in enumerate(chosen) for index in own}
        parts = [[tensors[index] for index in own] for own in chosen]
        self._optimizer = optimizer
        self._inner = like(optimizer, list(zip(groups, parts, strict=True)))

    @property
    def state(self) -> Mapping[int, _Entry]:
        """State of each segment that has one, by index of its parameter."""
        state = self._inner.state
        return {index: state[t] for index, t in self._tensors.items() if state.get(t)}

    def use_state(self, state: Mapping[int, _Entry]) -> None:
        """Replace the state of all segments."""
        self._inner.state.clear()
        self._inner.state.update({self._tensors[index]: entry for index, entry in state.items()})

    @property
    def used(self) -> list[int]:
        """The parameters with a segment here for which some rank has a gradient."""
        return [index for index in self.owned if self._parameters[index].grad is not None]

    def gradients(self) -> list[torch.Tensor]:
        """Return the reduced gradients of the segments, where ranks have reduced them."""
        return [self._reduced(index) for index in self.used]

    def _reduced(self, index: int) -> torch.Tensor:
        segment, elements = self.owned[index], self._buckets.views.elements(index)
        return elements[segment.first : segment.first + segment.count]

    def gradient(self, index: int, kept: bool = True) -> torch.Tensor:
        """Return the reduced gradient of a segment."""
        outside = kept and not self._buckets.views.holds(index)
        return self._part(index) if outside else self._reduced(index)

    def settings(self) -> list[dict[str, Any]]:
        """Return the present settings of each parameter group, as a step on segments uses them."""
        take_settings(self._inner, self._optimizer.param_groups)
        return self._inner.param_groups

    def entry(self, index: int) -> _Entry:
        """Return the state of a segment, to be changed in place."""
        found: _Entry = self._inner.state[self._tensors[index]]
        return found

    def step(self, left: Collection[int] = (), kept: bool = True) -> None:
        """Step on the segments of the parameters that are used."""
        take_settings(self._inner, self._optimizer.param_groups)
        state = self._inner.state
        used = [index for index in self.used if index not in left]
        # Some of torch's optimizers take no parameters with and without state together.
        for wanted in (True, False):
            chosen = [i for i in used if bool(state.get(self._tensors[i])) is wanted]
            if not chosen:
                continue
            for tensor in self._tensors.values():
                tensor.grad = None
            for index in chosen:
                self._tensors[index].grad = self.gradient(index, kept)
            self._inner.step()
        for tensor in self._tensors.values():
            tensor.grad = None  # the next gradient may get its memory

    def _part(self, index: int) -> torch.Tensor:
        """Return this rank's segment of a gradient that the program has replaced."""
        gradient, segment = self._parameters[index].grad, self.owned[index]
        assert gradient is not None
        elements = in_memory_order(gradient, self._buckets.plan.specs[index])
        return elements[segment.first : segment.first + segment.count]
