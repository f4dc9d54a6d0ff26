"""Sums of gradients and steps of torch's fused optimizers on segments, in one pass (local)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from hvdtrain.core.places.places import GradientPlaces, Pieces
from hvdtrain.core.sharding.exchange import KERNEL_TYPES, ShardedExchange
from hvdtrain.core.sharding.kernel import KernelRule
from hvdtrain.core.sharding.kernel_step import KernelStep, Scales
from hvdtrain.core.sharding.segments import Quantity
from hvdtrain.torch.gradients.buckets import ParameterBuckets
from hvdtrain.torch.sharding.fused_form import STATES, kernel_rule
from hvdtrain.torch.sharding.segment_steps import SegmentSteps
from hvdtrain.torch.sharding.state_memory import StateMemory
from hvdtrain.types import DType


class FusedUpdate:
    """The sums and the step of this rank's segments.

    Args:
        boards: factor of the gradients of each rank of the node, [1] each.
    """

    def __init__(
        self,
        kind: type,
        buckets: ParameterBuckets,
        steps: SegmentSteps,
        step: KernelStep,
        boards: Sequence[npt.NDArray[np.float64]],
    ) -> None:
        self._kind, self._buckets, self._steps, self._boards = kind, buckets, steps, boards
        self._step, self._in_buckets = step, step.gradients.copy()
        self._specs = buckets.plan.specs
        self.parameters = {
            index: number
            for number, index in enumerate(
                i for i in steps.owned if self._specs[i].dtype in KERNEL_TYPES
            )
        }
        self._places = None if buckets.staying is None else buckets.staying.places
        self._pieces = None if self._places is None else self._cut(self._places)
        self._state: StateMemory | None = None
        self._takes_state = False
        self._rules: list[KernelRule] = []

    @property
    def takes_all(self) -> bool:
        """Whether the kernel takes all segments, the same on all ranks."""
        return all(spec.dtype in KERNEL_TYPES for spec in self._specs)

    def prepare(self, state: StateMemory) -> bool:
        """Use the present settings, and memory for the state."""
        if state is not self._state:
            self._state = state
            self._takes_state = all(
                spec.dtype not in KERNEL_TYPES or self._can_keep(kept, spec.dtype)
                for spec, kept in zip(self._specs, state.quantities, strict=True)
            )
            if self._takes_state:
                self._use_state(state)
        rules = [kernel_rule(self._kind, group) for group in self._steps.settings()]
        self._rules = [rule for rule in rules if rule is not None]
        return self._takes_state and len(self._rules) == len(rules)

    def _can_keep(self, quantities: Mapping[str, Quantity], dtype: DType) -> bool:
        return all(
            (quantity.dtype is dtype and quantity.elementwise)
            if name in STATES[self._kind]
            else (name, quantity.dtype) == ("step", DType.FLOAT32)
            for name, quantity in quantities.items()
        )

    def _use_state(self, state: StateMemory) -> None:
        for index, number in self.parameters.items():
            slots = {name: slot.data_ptr() for name, slot in state.slots(index).items()}
            steps = slots.pop("step", 0)
            names = [name for name in STATES[self._kind] if name in slots]
            self._step.use_state(number, [slots[name] for name in names], steps)

    def update(self, factor: float, kept: bool) -> None:
        """Update the weights on all ranks."""
        assert self._state is not None
        used = self._used()
        for index, number in self.parameters.items():
            begins = index in used and self._state.begin(index, self._steps.entry(index))
            self._step.select(number, index in used, begins)
        scales = self._scales()
        gradients = {} if scales else {i: self._steps.gradient(i, kept) for i in used}
        self._point_to(gradients)
        self._step.update(self._rules, scales, factor)

    def sum(self) -> float:
        """Sum the gradients of this rank's segments; return the sum of their squares."""
        used = self._used()
        for index, number in self.parameters.items():
            self._step.select(number, index in used, begins=False)
        scales = self._scales()
        self._point_to(
            {} if scales else {index: self._steps.gradient(index, kept=False) for index in used}
        )
        return self._step.sum(scales)

    def _used(self) -> set[int]:
        return set(self._steps.used) & self.parameters.keys()

    def _scales(self) -> Scales | None:
        """Return the factors of the gradients; None if they are summed."""
        exchange = self._buckets.exchange
        if not isinstance(exchange, ShardedExchange) or not exchange.pending:
            return None
        return Scales([float(board[0]) for board in self._boards], exchange.scales[1])

    def _cut(self, places: GradientPlaces) -> Pieces:
        """Return the segments that the kernel takes as pieces of gradients."""
        rows = []
        for index in self.parameters:
            segment, size = self._steps.owned[index], self._specs[index].dtype.itemsize
            bucket = places.offset(self._buckets.reducer.buffers[segment.bucket])
            in_memory = bucket + segment.start * size
            rows.append((index, segment.first * size, in_memory, segment.count))
        return Pieces.of(rows)

    def _point_to(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Use these reduced gradients, or those of all ranks where they lie."""
        if self._places is None or self._pieces is None:
            self._step.gradients[:] = self._in_buckets
        else:
            self._step.gradients[:] = self._places.addresses(self._pieces)
        for index, gradient in gradients.items():
            self._step.set_sum(self.parameters[index], gradient.data_ptr())
