"""The optimizer's step on the segments that this rank owns, for all ranks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

import torch

from hvdtrain.collective import collective
from hvdtrain.core.gradients.plan import BucketPlan
from hvdtrain.core.sharding.exchange import OwnedSlices
from hvdtrain.core.sharding.segments import segments_of
from hvdtrain.torch.buckets import ParameterBuckets
from hvdtrain.torch.operations.parts import parameters_of
from hvdtrain.torch.sharding.segment_optimizer import costs_of, fused_form, like
from hvdtrain.torch.sharding.state_memory import Entry, in_memory_order, in_shape


class OwnerUpdate(ABC):
    """Takes the optimizer's step on the segments that this rank owns, for all ranks.

    An optimizer like the user's has segments in place of parameters. The state is either there or,
    after give_back() and until the next step, in the user's optimizer.
    """

    # Whether each rank can read the state of all segments.
    readable = True

    def __init__(
        self, optimizer: torch.optim.Optimizer, buckets: ParameterBuckets, slices: OwnedSlices
    ) -> None:
        self._optimizer, self.buckets, self._slices = optimizer, buckets, slices
        assert buckets.sharded is not None  # as slices are its own
        self._exchange = buckets.sharded
        self._parameters = [parameter for _, parameter in buckets.named]
        self._numbers = {id(parameter): n for n, parameter in enumerate(self._parameters)}
        self._plan: BucketPlan | None = None
        self._given = True
        self._factor = 1.0  # of the reduced gradients, by which they are not multiplied yet

    @property
    def given(self) -> bool:
        """Whether the state is in the user's optimizer, so that the next step takes it."""
        return self._given or any(each in self._optimizer.state for each in self._parameters)

    def withdraw(self) -> None:
        """Remove the state from the user's optimizer, because it is elsewhere, too."""
        for parameter in self._parameters:
            self._optimizer.state.pop(parameter, None)
        self._given = False

    def discard(self) -> None:
        """Take the state from the user's optimizer in the next step, even if empty."""
        self._given = True

    @collective
    def give_back(self) -> None:
        """Move the whole state into every user's optimizer, until the next step."""
        if not self.given:
            self._give(self._whole_state())

    @collective
    def consolidate(self, to: int) -> None:
        """Bring the whole state to one member, for give_consolidated()."""
        assert self.readable  # where it is

    def give_consolidated(self) -> bool:
        """Move a consolidated state into the user's optimizer, and return whether it is there."""
        return False

    def _give(self, whole: Mapping[int, Entry]) -> None:
        self._given = True
        for parameter in parameters_of(self._optimizer):
            entry = whole.get(self._numbers.get(id(parameter), -1))
            if entry is not None:
                self._optimizer.state[parameter] = entry

    @abstractmethod
    @collective
    def _whole_state(self) -> Mapping[int, Entry]:
        """Return the state of each parameter that has one."""

    @collective
    def _prepare(self) -> None:
        """Follow a new plan, and take the state that the optimizer was given."""
        self._follow_plan()
        if self.given:
            self._take()

    @collective
    def _follow_plan(self) -> None:
        if self._plan is self.buckets.plan:
            return
        self.give_back()
        plan, slices, groups = self.buckets.plan, self._slices, self._optimizer.param_groups
        whole = self._exchange.whole_tensors
        costs = costs_of(self._optimizer, plan.specs) if whole else None
        self._segments = segments_of(plan, slices.owners, costs)
        found = self._segments[slices.number] if slices.number < slices.owners else []
        self._owned = {segment.parameter: segment for segment in found}
        self._tensors = {i: self._in_shape(i, part) for i, part in self._cut().items()}
        chosen = [[self._numbers.get(id(p), -1) for p in group["params"]] for group in groups]
        owned = [[index for index in own if index in self._owned] for own in chosen]
        self._groups = {index: number for number, own in enumerate(owned) for index in own}
        parts = [[self._tensors[index] for index in own] for own in owned]
        self._inner = like(self._optimizer, list(zip(groups, parts, strict=True)))
        self._plan, self._given = plan, True

    @abstractmethod
    def _cut(self) -> Mapping[int, torch.Tensor]:
        """Return the weights of each segment of a new plan, 1-d."""

    def _take(self) -> None:
        """Move the state from the user's optimizer to the segments."""
        parts = {}
        for index, tensor in self._tensors.items():
            entry = self._optimizer.state.get(self._parameters[index])
            if entry is not None:
                parts[tensor] = self._keep(index, entry)
        self._inner.state.clear()
        self._inner.state.update(parts)
        self.withdraw()

    @abstractmethod
    def _keep(self, index: int, entry: Entry) -> Entry:
        """Return a copy of what belongs to this rank's segment of a parameter's state."""

    def _in_shape(self, index: int, elements: torch.Tensor) -> torch.Tensor:
        """Return the elements of a segment, 1-d, or of a whole parameter, in its shape."""
        return in_shape(elements, self._owned[index], self.buckets.plan.specs[index])

    def _part_of(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements of a tensor of a parameter's shape."""
        elements = in_memory_order(tensor, self.buckets.plan.specs[index])
        return self._in_shape(index, elements[self._owned[index].in_parameter])

    @property
    def _used(self) -> list[int]:
        """The parameters with a segment here for which some rank has a gradient."""
        return [index for index in self._owned if self._parameters[index].grad is not None]

    def _gradient(self, index: int, kept: bool) -> torch.Tensor:
        """Return the gradient of a segment: the reduced one, or what the program has kept."""
        gradient = self._parameters[index].grad
        if kept and not self.buckets.holds(index):
            assert gradient is not None
            return self._part_of(index, gradient)
        elements = self.buckets.elements(index)
        return self._in_shape(index, elements[self._owned[index].in_parameter])

    def _own_gradients(self) -> list[torch.Tensor]:
        """Return the reduced gradients of this rank's segments that have elements."""
        return [self._gradient(i, kept=False) for i in self._used if self._owned[i].count]

    def _follow_settings(self) -> list[dict[str, Any]]:
        """Take and return the settings of the user's groups, which schedulers may have changed."""
        kind, groups = type(self._optimizer), self._optimizer.param_groups
        for own, group in zip(self._inner.param_groups, groups, strict=True):
            own.update({**group, **fused_form(kind, group), "params": own["params"]})
        return self._inner.param_groups

    def _step_on_segments(self, kept: bool, left: Collection[int] = ()) -> list[int]:
        """Step with torch on the segments that are used and not left; return these."""
        self._follow_settings()
        state, tensors = self._inner.state, self._tensors
        used = [index for index in self._used if index not in left]
        # Some of torch's optimizers take no parameters with and without state together.
        for wanted in (True, False):
            chosen = [index for index in used if bool(state.get(tensors[index])) is wanted]
            if not chosen:
                continue
            for tensor in tensors.values():
                tensor.grad = None
            for index in chosen:
                tensors[index].grad = self._gradient(index, kept)
            self._inner.step()
        for tensor in tensors.values():
            tensor.grad = None  # the next gradient may get its memory
        return used

    def begin(self) -> None:
        """Begin with other reduced gradients."""
        self._factor = 1.0

    @collective
    def settle(self) -> None:
        """Sum this rank's slices and scale them, if that was left to the step."""
        self.buckets.sum_slices()
        factor, self._factor = self._factor, 1.0
        if factor != 1.0:
            self._prepare()
            if own := self._own_gradients():
                torch._foreach_mul_(own, factor)

    @abstractmethod
    @collective
    def step(self, kept: bool) -> None:
        """Update the weights of all ranks with the gradients of the owners."""

    def end_step(self, kept: bool, whole: bool) -> None:
        """Forget the gradients, unless they are kept; `whole` says what the next buckets have."""
        self._exchange.whole = whole or self._exchange.whole_tensors
        if not kept:
            self.buckets.drop()
        self.buckets.leave_to_program()

    def scale(self, factor: torch.Tensor) -> None:
        """Multiply the reduced gradients that this rank owns, at the latest in the step."""
        self._factor *= float(factor)

    @abstractmethod
    @collective
    def norm(self, kind: float) -> torch.Tensor:
        """Return the norm of all reduced gradients together, float64 []."""


def power_sum(own: list[torch.Tensor], kind: float, device: torch.device) -> torch.Tensor:
    """Return the sum of powers of the elements of tensors, or the largest, float64 []."""
    if not own:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = [norm.to(device, torch.float64) for norm in torch._foreach_norm(own, kind)]
    stacked = torch.stack(norms)
    return stacked.max() if math.isinf(kind) else stacked.pow(kind).sum()
