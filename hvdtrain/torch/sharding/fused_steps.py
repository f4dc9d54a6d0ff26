"""Whether the ranks sum and step in one pass, and where their gradients and weights are."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core.collectives.allreduce import Allreduce
from hvdtrain.core.collectives.memory import AllocateMemory
from hvdtrain.core.sharding.exchange import KERNEL_TYPES
from hvdtrain.core.sharding.kernel_step import Form, KernelStep, Place
from hvdtrain.core.sharding.segments import Segment
from hvdtrain.engines.slices import Slices
from hvdtrain.torch.gradients.buckets import ParameterBuckets
from hvdtrain.torch.sharding.fused_form import find_form
from hvdtrain.torch.sharding.fused_update import FusedUpdate
from hvdtrain.torch.sharding.segment_steps import SegmentSteps
from hvdtrain.torch.sharding.weight_memory import WeightMemory
from hvdtrain.types import DType, ReduceOp


class FusedSteps:
    """What all ranks need to sum and step in one pass.

    Attributes:
        boards: memory for the factor of each rank's gradients, float64 [1] each.
    """

    def __init__(self, kind: type, buckets: ParameterBuckets, slices: Slices) -> None:
        self._kind, self._buckets, self._slices = kind, buckets, slices
        self._form = _agreed(find_form(kind) if slices.in_tree else None, buckets)
        self.boards: list[npt.NDArray[np.float64]] = []
        if self._form is not None:
            name = f"of factors of {buckets.reducer.name}"
            memory = buckets.channel.run(AllocateMemory(8, name))
            self.boards = [copy.view(np.float64) for copy in slices.copies(memory) or ()]

    def update_of(self, steps: SegmentSteps, weights: WeightMemory) -> FusedUpdate | None:
        """Return the update of this rank's segments; None if a rank cannot take it."""
        if self._form is None or not self.boards:
            return None
        specs = self._buckets.plan.specs
        taken = [s for s in steps.owned.values() if specs[s.parameter].dtype in KERNEL_TYPES]
        places = [self._place(s, steps.groups[s.parameter], self._form, weights) for s in taken]
        step = KernelStep(places, len(self.boards), self._slices.number, self._form)
        return FusedUpdate(self._kind, self._buckets, steps, step, self.boards)

    def _place(self, segment: Segment, group: int, form: Form, weights: WeightMemory) -> Place:
        spec = self._buckets.plan.specs[segment.parameter]
        size = spec.dtype.itemsize
        copies = self._slices.copies(self._buckets.memory["cpu"])
        assert copies is not None  # as when the slices were found
        bases = [copy.ctypes.data for copy in copies]
        buffer = self._buckets.reducer.buffers[segment.bucket]
        offset = buffer.pointer + segment.start * size - bases[self._slices.number]
        return Place(
            [base + offset for base in bases],
            weights.addresses(segment),
            segment.count,
            form.rest(spec.count, segment.first, segment.count, size),
            group,
            spec.dtype is DType.FLOAT64,
        )


@collective
def _agreed(form: Form | None, buckets: ParameterBuckets) -> Form | None:
    """Return the form if it is that of all ranks, else None."""
    own = 0 if form is None else 2 * form.width_bytes + form.contracts
    ends = np.array([own, -own], np.int64)
    name = f"form of {buckets.reducer.name}"
    buckets.channel.run(Allreduce([Buffer.from_array(ends)], [(2,)], ReduceOp.MIN, name))
    lowest, highest = ends.tolist()
    return form if lowest == -highest else None
