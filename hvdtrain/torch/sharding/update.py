"""The optimizer's step on the segments that this rank owns, and that of the ranks of a node."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from functools import partial

import torch

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core.gradients.plan import BucketPlan
from hvdtrain.core.sharding.exchange import OwnedSlices
from hvdtrain.core.sharding.owners import NodeOwners
from hvdtrain.core.sharding.segments import Quantity, Segment, segments_of, whole_segments_of
from hvdtrain.engines.communicator import Slices
from hvdtrain.torch.gradients.buckets import ParameterBuckets
from hvdtrain.torch.sharding.fused_update import FusedUpdate
from hvdtrain.torch.sharding.segment_optimizer import SegmentSteps, costs_of, quantities_of
from hvdtrain.torch.sharding.state_memory import (
    Entry,
    TorchStateMemory,
    WeightMemory,
    in_memory_order,
    in_shape,
)
from hvdtrain.torch.tensors.parts import parameters_of
from hvdtrain.types import ReduceOp


class OwnerUpdate(ABC):
    """Takes the optimizer's step on the segments that this rank owns, for all ranks.

    The state is either with the segments or, after give_back() and until the next step, in the
    user's optimizer.
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
        if self._plan is not self.buckets.plan:
            self.give_back()
            plan, slices = self.buckets.plan, self._slices
            self._segments = (
                whole_segments_of(plan, slices.owners, costs_of(self._optimizer, plan.specs))
                if self._exchange.whole_tensors
                else segments_of(plan, slices.owners)
            )
            found = self._segments[slices.number] if slices.number < slices.owners else []
            owned = {segment.parameter: segment for segment in found}
            self._tensors = {
                index: in_shape(elements, owned[index], plan.specs[index])
                for index, elements in self._cut(owned).items()
            }
            self._steps = SegmentSteps(self._optimizer, self.buckets, owned, self._tensors)
            self._plan, self._given = plan, True

    @abstractmethod
    def _cut(self, owned: Mapping[int, Segment]) -> Mapping[int, torch.Tensor]:
        """Return the weights of each segment of a new plan, 1-d."""

    def _take(self) -> None:
        """Move the state from the user's optimizer to the segments."""
        parts = {}
        for index in self._steps.owned:
            entry = self._optimizer.state.get(self._parameters[index])
            if entry is not None:
                parts[index] = self._keep(index, entry)
        self._steps.use_state(parts)
        self.withdraw()

    @abstractmethod
    def _keep(self, index: int, entry: Entry) -> Entry:
        """Return a copy of what belongs to this rank's segment of a parameter's state."""

    def _part_of(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements of a tensor of a parameter's shape."""
        spec, segment = self.buckets.plan.specs[index], self._steps.owned[index]
        return in_shape(in_memory_order(tensor, spec)[segment.in_parameter], segment, spec)

    @collective
    def gradients(self) -> list[torch.Tensor]:
        """Return the reduced gradients that this rank owns (collective after a new plan)."""
        self._prepare()
        return self._steps.gradients()

    def begin(self) -> None:
        """Begin with other reduced gradients."""
        self._factor = 1.0

    @collective
    def settle(self) -> None:
        """Sum this rank's slices and scale them, if that was left to the step."""
        self.buckets.sum_slices()
        factor, self._factor = self._factor, 1.0
        if factor != 1.0 and (own := self.gradients()):
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
        self.buckets.release()

    def scale(self, factor: torch.Tensor) -> None:
        """Multiply the reduced gradients that this rank owns, at the latest in the step."""
        self._factor *= float(factor)

    @abstractmethod
    @collective
    def norm(self, kind: float) -> torch.Tensor:
        """Return the norm of all reduced gradients together, float64 []."""


class TorchSharedUpdate(OwnerUpdate):
    """Takes the step for all ranks of the node, in memory that all of them can read.

    Where the compiled kernel has the bits of torch's fused optimizer, gradients are left in their
    buckets until the step, which sums them in the same pass.
    """

    _slices: Slices

    @collective
    def __init__(
        self, optimizer: torch.optim.Optimizer, buckets: ParameterBuckets, slices: Slices
    ) -> None:
        super().__init__(optimizer, buckets, slices)
        self._owners = NodeOwners(buckets.channel, slices, buckets.name)
        self._weights = WeightMemory(self._parameters, buckets.plan.specs, self._owners)
        self.shared = self._weights.shared
        self._kernel = FusedUpdate(type(optimizer), buckets, self._owners)
        self._memory: TorchStateMemory | None = None
        self._settings: object = None

    @collective
    def step(self, kept: bool) -> None:
        fused = self._prepare_kernel()
        if fused is None or (self._factor != 1.0 and not fused.takes_all):
            self.settle()  # what the kernel does not take is scaled, too
        pairs = self._step_on_segments(fused.parameters if fused else (), kept)
        write = partial(fused.update, self._factor, kept) if fused else None
        self._owners.put("weights", pairs, write)
        # Autograd does not see who writes; a graph with the old weights must not be used again.
        changed = [parameter for parameter in self._parameters if parameter.grad is not None]
        torch.autograd.graph.increment_version(changed)
        self._exchange.pending.clear()
        self._factor = 1.0
        defers = fused is not None and self._slices.nodes == 1
        self._exchange.defer_to(self._kernel.boards[self._owners.number] if defers else None)

    def _step_on_segments(self, left: Collection[int], kept: bool) -> list[tuple[Buffer, Buffer]]:
        """Step with torch; return weights that have changed, and their places on other ranks."""
        assert self._memory is not None
        self._steps.step(left, kept)
        used = [index for index in self._steps.used if index not in left]
        for index in used:
            self._memory.keep(index, self._steps.entry(index))
        return [pair for index in used for pair in self._weights.places(self._steps.owned[index])]

    @collective
    def _prepare_kernel(self) -> FusedUpdate | None:
        """Prepare for a step, and return the kernel's part in it."""
        self._prepare()
        self._weights.follow()
        assert self._memory is not None
        return self._kernel if self._kernel.prepare(self._memory) else None

    def _cut(self, owned: Mapping[int, Segment]) -> Mapping[int, torch.Tensor]:
        self._memory = None
        return {index: self._weights.segment(segment) for index, segment in owned.items()}

    @collective
    def _prepare(self) -> None:
        self._follow_plan()
        settings = _settings_that_matter(self._optimizer)
        if self._memory is None or settings != self._settings:
            # Change the state only when all ranks have read it and have come here to allocate.
            self.give_back()
            if self._memory is None:
                self._kernel.use(self._steps, self._weights)
            self._memory = TorchStateMemory(
                self._owners, self._segments, self._quantities(), self.buckets.plan.specs
            )
            self._settings = settings
        super()._prepare()

    def _quantities(self) -> Sequence[Mapping[str, Quantity]]:
        """Return what the optimizer keeps for each parameter, the same on all ranks."""
        found: list[Mapping[str, Quantity]] = [{}] * len(self._parameters)
        for group in self._optimizer.param_groups:
            known: dict[object, Mapping[str, Quantity]] = {}
            for parameter in group["params"]:
                index = self._numbers.get(id(parameter))
                if index is None:
                    continue
                # Of a shape in which no two lengths are equal, and few numbers.
                shape = (2, *range(3, parameter.ndim + 2)) if self._exchange.whole_tensors else (2,)
                names = tuple(self._optimizer.state.get(parameter, ()))
                key = (parameter.dtype, shape, names)
                if key not in known:
                    known[key] = quantities_of(self._optimizer, group, parameter, shape)
                found[index] = known[key]
        return found

    def _take(self) -> None:
        assert self._memory is not None
        self._memory.clear()
        super()._take()

    def _keep(self, index: int, entry: Entry) -> Entry:
        assert self._memory is not None
        kept, quantities = dict(entry), self._memory.quantities[index]
        for name, value in entry.items():
            if isinstance(value, torch.Tensor) and quantities[name].elementwise:
                kept[name] = self._part_of(index, value)
        self._memory.keep(index, kept)
        return kept

    def _whole_state(self) -> Mapping[int, Entry]:
        assert self._memory is not None
        found = {index: self._memory.read(index) for index in range(len(self._parameters))}
        return {index: entry for index, entry in found.items() if entry}

    @collective
    def norm(self, kind: float) -> torch.Tensor:
        largest, own = math.isinf(kind), self._power_sum(kind)
        total = self._owners.total(own, ReduceOp.MAX if largest else ReduceOp.SUM)
        norm = total if largest else total ** (1.0 / kind)
        return torch.tensor(norm, dtype=torch.float64, device="cpu")

    @collective
    def _power_sum(self, kind: float) -> float:
        """Sum this rank's slices; return the sum of powers of their elements, or the largest."""
        fused = self._prepare_kernel()
        if kind == 2.0 and self._factor == 1.0 and fused and fused.takes_all:
            total = fused.sum()
            self._exchange.pending.clear()
            return total
        self.settle()
        return float(power_sum(self.gradients(), kind, torch.device("cpu")))


def power_sum(own: list[torch.Tensor], kind: float, device: torch.device) -> torch.Tensor:
    """Return the sum of powers of the elements of tensors, or the largest, float64 []."""
    if not own:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = [norm.to(device, torch.float64) for norm in torch._foreach_norm(own, kind)]
    stacked = torch.stack(norms)
    return stacked.max() if math.isinf(kind) else stacked.pow(kind).sum()


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
