"""Sums of gradients and steps of torch's fused optimizers on segments, in one pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hvdtrain.buffer import Buffer
from hvdtrain.core.collectives.allreduce import Allreduce
from hvdtrain.core.collectives.memory import AllocateMemory
from hvdtrain.core.sharding.kernel import KernelRule
from hvdtrain.core.sharding.kernel_step import Form, KernelStep, Place, Scales
from hvdtrain.core.sharding.segments import Quantity, Segment
from hvdtrain.engines.slices import Slices
from hvdtrain.torch.gradients.buckets import ParameterBuckets
from hvdtrain.torch.sharding.fused_form import STATES, find_form, kernel_rule
from hvdtrain.torch.sharding.state_memory import StateMemory
from hvdtrain.torch.sharding.weight_memory import WeightMemory
from hvdtrain.types import DType, ReduceOp

__all__ = ["FusedSteps", "FusedUpdate"]


class FusedSteps:
    """What the ranks need to sum and step in one pass (collective).

    Args:
        kind: class of the optimizer.
        buckets: buckets of its parameters.
        slices: slices of the buckets.

    Attributes:
        form: form of the steps, equal on all ranks; None if a rank cannot take them.
        board: factor of the gradients of each rank of the node, [1] each.
        own: number of this rank on the node.
    """

    def __init__(self, kind: type, buckets: ParameterBuckets, slices: Slices) -> None:
        self._kind, self.own = kind, slices.number
        self.form = _agreed(find_form(kind) if slices.in_tree else None, buckets)
        self.board: list[npt.NDArray[np.float64]] = []
        if self.form is not None:
            name = f"of factors of {buckets.reducer.name}"
            memory = buckets.channel.run(AllocateMemory(8, name))
            copies = slices.copies(memory)
            if copies is None:
                self.form = None
            else:
                self.board = [copy.view(np.float64) for copy in copies]

    def rules(self, groups: Sequence[Mapping[str, Any]]) -> list[KernelRule] | None:
        """Return the settings of all groups; None if the kernel lacks one of them (local)."""
        if self.form is None:
            return None
        found = [kernel_rule(self._kind, group) for group in groups]
        return None if None in found else [rule for rule in found if rule is not None]

    def takes_state(self, quantities: Mapping[str, Quantity], dtype: DType) -> bool:
        """Return whether the kernel can change such a state of a parameter (local)."""
        return all(
            (quantity.dtype is dtype and quantity.elementwise)
            if name in STATES[self._kind]
            else (name, quantity.dtype) == ("step", DType.FLOAT32)
            for name, quantity in quantities.items()
        )

    def update_of(
        self,
        segments: Sequence[tuple[Segment, int]],
        buckets: ParameterBuckets,
        slices: Slices,
        weights: WeightMemory,
    ) -> FusedUpdate:
        """Return the update of this rank's segments, given with the numbers of their groups."""
        assert self.form is not None
        copies = slices.copies(buckets.memory["cpu"])
        assert copies is not None  # as when the slices were found
        starts = [copy.ctypes.data - copies[self.own].ctypes.data for copy in copies]
        places = []
        for segment, group in segments:
            spec = buckets.plan.specs[segment.parameter]
            size = spec.dtype.itemsize
            first = buckets.reducer.buffers[segment.bucket].pointer + segment.start * size
            places.append(
                Place(
                    [first + start for start in starts],
                    weights.addresses(segment),
                    segment.count,
                    self.form.rest(spec.count, segment.first, segment.count, size),
                    group,
                    spec.dtype is DType.FLOAT64,
                )
            )
        step = KernelStep(places, len(copies), self.own, self.form)
        return FusedUpdate([segment.parameter for segment, _ in segments], step, self)


def _agreed(form: Form | None, buckets: ParameterBuckets) -> Form | None:
    """Return the form if it is that of all ranks, else None (collective)."""
    own = 0 if form is None else 2 * form.width_bytes + form.contracts
    ends = np.array([own, -own], np.int64)
    name = f"form of {buckets.reducer.name}"
    buckets.channel.run(Allreduce([Buffer.from_array(ends)], [(2,)], ReduceOp.MIN, name))
    lowest, highest = ends.tolist()
    return form if lowest == -highest else None


class FusedUpdate:
    """The update of this rank's segments (local).

    Args:
        parameters: index of each segment's parameter.
        step: step on the segments.
        steps: what the ranks have in common.

    Attributes:
        parameters: index of each segment's parameter.
    """

    def __init__(self, parameters: Sequence[int], step: KernelStep, steps: FusedSteps) -> None:
        self.parameters, self._step, self._steps = parameters, step, steps
        self._in_buckets = step.gradients.copy()

    def use_state(self, state: StateMemory) -> None:
        """Use the memory for the state of the segments."""
        for number, index in enumerate(self.parameters):
            slots = {name: slot.data_ptr() for name, slot in state.slots(index).items()}
            steps = slots.pop("step", 0)
            names = [name for name in STATES[self._steps._kind] if name in slots]
            self._step.use_state(number, [slots[name] for name in names], steps)

    def select(self, used: Mapping[int, bool]) -> None:
        """Set which parameters have gradients, and whether there is no state of them yet."""
        for number, index in enumerate(self.parameters):
            self._step.select(number, index in used, used.get(index, False))

    def use_sums(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Step on reduced gradients, 1-d, by parameter; the other ranks' are not read."""
        for number, index in enumerate(self.parameters):
            if index in gradients:
                self._step.gradients[number, self._steps.own] = gradients[index].data_ptr()

    def use_buckets(self) -> None:
        """Sum the gradients in the buckets of all ranks."""
        self._step.gradients[:] = self._in_buckets

    def scales(self, postscale: float) -> Scales:
        """Return the factors of the gradients in the buckets."""
        return Scales([float(place[0]) for place in self._steps.board], postscale)

    def update(self, rules: Sequence[KernelRule], scales: Scales | None, factor: float) -> None:
        """Update weights and state; see `KernelStep.update`."""
        self._step.update(rules, scales, factor)

    def sum(self, scales: Scales | None) -> float:
        """Sum the gradients of this rank; see `KernelStep.sum`."""
        return self._step.sum(scales)
