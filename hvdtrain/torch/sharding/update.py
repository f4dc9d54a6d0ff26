"""The optimizer's step, shared by the ranks of a node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hvdtrain.core.collectives.memory import AllocateMemory
from hvdtrain.core.gradients.plan import BucketPlan
from hvdtrain.core.sharding.operations import PutSegments
from hvdtrain.core.sharding.segments import Quantity, Segment, segments_of
from hvdtrain.engines.slices import Slices
from hvdtrain.torch.gradients.buckets import ParameterBuckets
from hvdtrain.torch.sharding.segment_optimizer import like, quantities_of, take_settings
from hvdtrain.torch.sharding.state_memory import StateMemory, in_memory_order
from hvdtrain.torch.sharding.weight_memory import WeightMemory
from hvdtrain.torch.tensors.parameters import parameters_of

__all__ = ["SharedUpdate"]


class SharedUpdate:
    """Takes the optimizer's step on the segments that this rank owns, for all ranks of the node.

    The state lies in memory that all ranks of the node can read. It is either there or in the
    user's optimizer: give_back() moves it to the optimizer, and the next step takes it again.

    Args:
        optimizer: optimizer of the user.
        buckets: buckets of its parameters, with a ShardedExchange.
        slices: slices of the buckets.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, buckets: ParameterBuckets, slices: Slices
    ) -> None:
        self._optimizer, self.buckets, self._slices = optimizer, buckets, slices
        self._parameters = [parameter for _, parameter in buckets.named]
        self._index = {id(p): index for index, p in enumerate(self._parameters)}
        self._weights = WeightMemory(
            self._parameters,
            buckets.plan.specs,
            slices,
            buckets.channel,
            buckets.reducer.name,
        )
        self._plan: BucketPlan | None = None
        self._settings: object = None
        self._state: StateMemory | None = None
        self._given = False

    @property
    def nodes(self) -> int:
        """Number of nodes, each of which updates all weights."""
        return self._slices.nodes

    @property
    def shared(self) -> bool:
        """Whether the weights are in memory that all ranks of the node can write."""
        return self._weights.shared

    def step(self) -> None:
        """Update the weights of all ranks with the gradients of the owners (collective)."""
        self._prepare()
        self._weights.follow()
        take_settings(self._segment_optimizer, self._optimizer.param_groups)
        updated = self._step_on_segments()
        places = [pair for segment in updated for pair in self._places[segment.parameter]]
        name = f"weights of {self.buckets.reducer.name}"
        self.buckets.channel.run(PutSegments(places, name))

    def _prepare(self) -> None:
        """Follow a new plan, new settings of the optimizer, and state that it was given."""
        if self._plan is not self.buckets.plan:
            self.give_back()
            self._plan, self._state = self.buckets.plan, None
            self._cut()
        settings = _settings_that_matter(self._optimizer)
        if self._state is None or settings != self._settings:
            self._settings = settings
            # Others change the state only when all ranks have read it, and are here to allocate.
            self.give_back()
            self._allocate(self._quantities())
        if self.given:
            self._take()

    def _cut(self) -> None:
        """Divide weights and gradients into segments."""
        plan, slices = self.buckets.plan, self._slices
        self._segments = segments_of(plan, slices.owners)
        owned = self._segments[slices.number] if slices.number < slices.owners else []
        self._owned = {segment.parameter: segment for segment in owned}
        self._tensors = {s.parameter: self._weights.segment(s) for s in owned}
        self._places = {s.parameter: self._weights.places(s) for s in owned}
        groups = [
            (group, [self._tensors[index] for index in self._owned_of(group)])
            for group in self._optimizer.param_groups
        ]
        self._segment_optimizer = like(self._optimizer, groups)

    def _owned_of(self, group: Mapping[str, Any]) -> list[int]:
        found = [self._index.get(id(parameter)) for parameter in group["params"]]
        return [index for index in found if index is not None and index in self._owned]

    def _quantities(self) -> Sequence[Mapping[str, Quantity]]:
        """Return what the optimizer keeps for each parameter, the same on all ranks."""
        found: dict[int, Mapping[str, Quantity]] = {}
        for group in self._optimizer.param_groups:
            known: dict[object, Mapping[str, Quantity]] = {}
            for parameter in group["params"]:
                index = self._index.get(id(parameter))
                if index is None:
                    continue
                key = (parameter.dtype, tuple(self._optimizer.state.get(parameter, ())))
                if key not in known:
                    known[key] = quantities_of(self._optimizer, group, parameter)
                found[index] = known[key]
        return [found.get(index, {}) for index in range(len(self._parameters))]

    def _allocate(self, quantities: Sequence[Mapping[str, Quantity]]) -> None:
        """Allocate memory for the state (collective)."""
        self._state = StateMemory(self.buckets.plan.specs, self._segments, quantities)
        name = f"of the optimizer of {self.buckets.reducer.name}"
        memory = self.buckets.channel.run(AllocateMemory(self._state.nbytes, name))
        copies = self._slices.copies(memory)
        if copies is None:
            raise RuntimeError(
                f"sharded=True: {self._state.nbytes >> 10:,} KiB for the optimizer's state cannot "
                "be shared on this node: free memory, or use sharded=False"
            )
        self._state.use(copies, self._slices.number)

    def _take(self) -> None:
        """Move the state from the user's optimizer into the memory."""
        assert self._state is not None
        self._state.clear()
        self._segment_optimizer.state.clear()
        for index, segment in self._owned.items():
            entry = self._optimizer.state.get(self._parameters[index])
            if entry is not None:
                part = self._state.cut(segment, entry)
                self._state.keep(index, part)
                self._segment_optimizer.state[self._tensors[index]] = part
        self.withdraw()

    def withdraw(self) -> None:
        """Remove the state from the user's optimizer, because it is in the memory, too (local)."""
        for parameter in self._parameters:
            self._optimizer.state.pop(parameter, None)
        self._given = False

    @property
    def given(self) -> bool:
        """Whether the state is in the user's optimizer, so that the next step takes it."""
        loaded = any(parameter in self._optimizer.state for parameter in self._parameters)
        return self._state is None or self._given or loaded

    def give_back(self) -> None:
        """Move the whole state into the user's optimizer, until the next step (local)."""
        if self._state is None or self.given:
            return
        self._given = True
        for parameter in parameters_of(self._optimizer):
            index = self._index.get(id(parameter))
            entry = None if index is None else self._state.read(index)
            if entry:
                self._optimizer.state[parameter] = entry

    def discard(self) -> None:
        """Take the state from the user's optimizer in the next step, even if empty (local)."""
        self._given = True

    def _step_on_segments(self) -> list[Segment]:
        """Step on the segments whose parameters have gradients; return these segments."""
        assert self._state is not None
        state, views = self._segment_optimizer.state, self.buckets.views
        used = [i for i in self._owned if self._parameters[i].grad is not None]
        # Some of torch's optimizers take no parameters with and without state together.
        for wanted in (True, False):
            chosen = [i for i in used if bool(state.get(self._tensors[i])) is wanted]
            if not chosen:
                continue
            for tensor in self._tensors.values():
                tensor.grad = None
            for index in chosen:
                own = views.holds(index)
                self._tensors[index].grad = self._gradient(index) if own else self._part(index)
            self._segment_optimizer.step()
        for tensor in self._tensors.values():
            tensor.grad = None  # a gradient that stays where it was made is returned there
        for index in used:
            self._state.keep(index, state.get(self._tensors[index], {}))
        return [self._owned[index] for index in used]

    def _part(self, index: int) -> torch.Tensor:
        """Return this rank's segment of a gradient that the program has replaced."""
        gradient, segment = self._parameters[index].grad, self._owned[index]
        assert gradient is not None
        elements = in_memory_order(gradient, self.buckets.plan.specs[index])
        return elements[segment.first : segment.first + segment.count]

    def gradients(self) -> list[torch.Tensor]:
        """Return the reduced gradients that this rank owns (collective after a new plan)."""
        self._prepare()
        used = [i for i in self._owned if self._parameters[i].grad is not None]
        return [self._gradient(index) for index in used]

    def _gradient(self, index: int) -> torch.Tensor:
        """Return the reduced gradient of a segment that this rank owns."""
        segment = self._owned[index]
        return self.buckets.views.elements(index)[segment.first : segment.first + segment.count]


def _settings_that_matter(optimizer: torch.optim.Optimizer) -> object:
    """Return which settings are on, because the optimizer's state depends on these.

    Rates, which may change from and to 0 in any step, are left out.
    """
    return [
        {
            key: bool(value)
            for key, value in group.items()
            if value is None or isinstance(value, bool) or key == "momentum"
        }
        for group in optimizer.param_groups
    ]
