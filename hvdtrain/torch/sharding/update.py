"""The optimizer's step, shared by the ranks of a node."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from hvdtrain.core.collectives.memory import AllocateMemory
from hvdtrain.core.gradients.plan import BucketPlan
from hvdtrain.core.sharding.exchange import KERNEL_TYPES, ShardedExchange
from hvdtrain.core.sharding.kernel import KernelRule
from hvdtrain.core.sharding.kernel_step import Scales
from hvdtrain.core.sharding.operations import PutSegments
from hvdtrain.core.sharding.segments import Quantity, Segment, segments_of
from hvdtrain.engines.slices import Slices
from hvdtrain.torch.gradients.buckets import ParameterBuckets
from hvdtrain.torch.gradients.slices import sum_slices
from hvdtrain.torch.sharding.fused_update import FusedSteps, FusedUpdate
from hvdtrain.torch.sharding.segment_optimizer import like, quantities_of, take_settings
from hvdtrain.torch.sharding.state_memory import StateMemory, in_memory_order
from hvdtrain.torch.sharding.weight_memory import WeightMemory
from hvdtrain.torch.tensors.buffers import from_buffer
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
        self._fused_steps = FusedSteps(type(optimizer), buckets, slices)
        self._fused: FusedUpdate | None = None
        self._fusible = False
        self._factor = 1.0  # of the reduced gradients, which have yet to be multiplied by it
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

    @property
    def exchange(self) -> ShardedExchange:
        """The exchange of the buckets."""
        exchange = self.buckets.exchange
        assert isinstance(exchange, ShardedExchange)
        return exchange

    def step(self, kept: bool) -> None:
        """Update the weights of all ranks with the gradients of the owners (collective).

        Args:
            kept: whether all ranks have the reduced gradients, so that the program may have
                replaced some.
        """
        self._prepare()
        self._weights.follow()
        take_settings(self._segment_optimizer, self._optimizer.param_groups)
        rules = self._rules()
        if rules is None:
            self.settle()
        together = [] if rules is None or self._fused is None else self._fused.parameters
        updated = self._step_on_segments(set(together), kept)
        places = [pair for segment in updated for pair in self._places[segment.parameter]]
        write = partial(self._step_together, rules, kept)
        name = f"weights of {self.buckets.reducer.name}"
        self.buckets.channel.run(PutSegments(places, write, name))
        self._factor = 1.0
        self.exchange.pending.clear()
        self._defer(rules is not None)

    def _defer(self, fused: bool) -> None:
        """Leave the sums of the next step to the update, if that is one pass."""
        deferred = fused and self._slices.nodes == 1
        self.exchange.defer_to(self._fused_steps.board[self._slices.number] if deferred else None)

    def _rules(self) -> list[KernelRule] | None:
        """Return the settings of all groups if sums and steps are one pass, else None."""
        if self._fused is None or not self._fusible:
            return None
        return self._fused_steps.rules(self._segment_optimizer.param_groups)

    def _step_together(self, rules: Sequence[KernelRule] | None, kept: bool) -> None:
        """Sum and step in one pass where that is possible."""
        if rules is None or self._fused is None:
            return
        self._select(self._fused, begin=True)
        gradients = self._point(self._fused, kept)
        self._fused.update(rules, self._scales(), self._factor)
        del gradients

    def _select(self, fused: FusedUpdate, begin: bool) -> None:
        """Tell which segments have gradients, and complete their state."""
        assert self._state is not None
        state = self._segment_optimizer.state
        used = {}
        for index in fused.parameters:
            if self._parameters[index].grad is not None:
                entry = state[self._tensors[index]] if begin else {}
                used[index] = begin and self._state.begin(index, entry)
        fused.select(used)

    def _point(self, fused: FusedUpdate, kept: bool) -> Mapping[int, torch.Tensor]:
        """Tell where the gradients are; return tensors that have to live until they are read."""
        if self.exchange.pending:
            fused.use_buckets()
            return {}
        used = [i for i in fused.parameters if self._parameters[i].grad is not None]
        gradients = {index: self._gradient(index, kept) for index in used}
        fused.use_sums(gradients)
        return gradients

    def _scales(self) -> Scales | None:
        """Return the factors of gradients that are not summed yet."""
        if self._fused is None or not self.exchange.pending:
            return None
        return self._fused.scales(self.exchange.scales[1])

    def settle(self) -> None:
        """Sum this rank's slices and scale them, if the update has yet to do so (collective)."""
        sum_slices(self.buckets)
        if self._factor != 1.0:
            own = self.gradients()
            if own:
                torch._foreach_mul_(own, self._factor)
            self._factor = 1.0

    def power_sum(self, kind: float) -> float:
        """Sum this rank's slices; return the sum of powers of all its elements (collective).

        Args:
            kind: power; inf for the largest absolute value.
        """
        if kind == 2.0 and self._factor == 1.0:
            total = self.squares()
            if total is not None:
                return total
        self.settle()
        own = self.gradients()
        if not own:
            return 0.0
        norms = torch.stack([norm.double() for norm in torch._foreach_norm(own, kind)])
        return float(norms.max() if math.isinf(kind) else norms.pow(kind).sum())

    def squares(self) -> float | None:
        """Sum this rank's slices; return the sum of the squares of all elements (collective).

        Returns:
            The sum; None where the kernel does not take all segments.
        """
        self._prepare()
        take_settings(self._segment_optimizer, self._optimizer.param_groups)
        fused = self._fused
        if self._rules() is None or fused is None or len(fused.parameters) < len(self._owned):
            return None
        self._select(fused, begin=False)
        self._point(fused, kept=False)
        total = fused.sum(self._scales())
        self.exchange.pending.clear()
        return total

    def scale(self, factor: float) -> None:
        """Multiply the reduced gradients that this rank owns, in the update at the latest (local)."""
        self._factor *= factor

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
        memory = [from_buffer(buffer) for buffer in self.buckets.reducer.buffers]
        self._tensors = {s.parameter: self._weights.segment(s) for s in owned}
        self._gradients = {
            s.parameter: memory[s.bucket][s.start : s.start + s.count] for s in owned
        }
        self._places = {s.parameter: self._weights.places(s) for s in owned}
        groups = self._optimizer.param_groups
        tensors = [[self._tensors[index] for index in self._owned_of(group)] for group in groups]
        pairs = list(zip(groups, tensors, strict=True))
        self._segment_optimizer = like(self._optimizer, pairs)
        self._fused = None
        if self._fused_steps.form is not None:
            numbered = {i: n for n, group in enumerate(groups) for i in self._owned_of(group)}
            taken = [s for s in owned if plan.specs[s.parameter].dtype in KERNEL_TYPES]
            self._fused = self._fused_steps.update_of(
                [(s, numbered[s.parameter]) for s in taken], self.buckets, slices, self._weights
            )

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
        specs = self.buckets.plan.specs
        self._fusible = self._fused is not None and all(
            spec.dtype not in KERNEL_TYPES or self._fused_steps.takes_state(kept, spec.dtype)
            for spec, kept in zip(specs, quantities, strict=True)
        )
        if self._fused is not None and self._fusible:
            self._fused.use_state(self._state)

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

    def _step_on_segments(self, left: Collection[int], kept: bool) -> list[Segment]:
        """Step on the segments whose parameters have gradients; return these segments.

        Args:
            left: parameters that are left to the pass that sums, too.
            kept: as for step().
        """
        assert self._state is not None
        state = self._segment_optimizer.state
        used = [i for i in self._used() if i not in left]
        # Some of torch's optimizers take no parameters with and without state together.
        for wanted in (True, False):
            chosen = [i for i in used if bool(state.get(self._tensors[i])) is wanted]
            if not chosen:
                continue
            for tensor in self._tensors.values():
                tensor.grad = None
            for index in chosen:
                self._tensors[index].grad = self._gradient(index, kept)
            self._segment_optimizer.step()
        for index in used:
            self._state.keep(index, state.get(self._tensors[index], {}))
        return [self._owned[index] for index in used]

    def _used(self) -> list[int]:
        return [i for i in self._owned if self._parameters[i].grad is not None]

    def _gradient(self, index: int, kept: bool) -> torch.Tensor:
        """Return this rank's segment of a reduced gradient, 1-d."""
        if kept and not self.buckets.views.holds(index):
            return self._part(index)
        return self._gradients[index]

    def _part(self, index: int) -> torch.Tensor:
        """Return this rank's segment of a gradient that the program has replaced."""
        gradient, segment = self._parameters[index].grad, self._owned[index]
        assert gradient is not None
        elements = in_memory_order(gradient, self.buckets.plan.specs[index])
        return elements[segment.first : segment.first + segment.count]

    def gradients(self) -> list[torch.Tensor]:
        """Return the reduced gradients that this rank owns (collective after a new plan)."""
        self._prepare()
        return [self._gradients[index] for index in self._used()]


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
