"""Sums of gradients and steps of torch's fused optimizers on segments, in one pass (local)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from hvdtrain.collective import collective
from hvdtrain.core import context
from hvdtrain.core.objects import allgather_object
from hvdtrain.core.places import GradientPlaces, Pieces
from hvdtrain.core.sharding.exchange import KERNEL_TYPES
from hvdtrain.core.sharding.kernel import Form, KernelRule, KernelStep, Place, Scales
from hvdtrain.core.sharding.owners import NodeOwners
from hvdtrain.core.sharding.segments import Quantity, Segment
from hvdtrain.torch.gradients.buckets import ParameterBuckets
from hvdtrain.torch.sharding.kernel_step import STATES, TYPES, find_form, kernel_rule
from hvdtrain.torch.sharding.segment_optimizer import SegmentSteps
from hvdtrain.torch.sharding.state_memory import TorchStateMemory, WeightMemory
from hvdtrain.torch.tensors.parts import parameters_of
from hvdtrain.types import DType


@collective
def shares_exactly(optimizer: torch.optim.Optimizer, name: str) -> bool:
    """Return whether shared steps of an optimizer have the bits of its own steps.

    `sharded=True` changes no bit of weights and state for steps of SGD, Adam and AdamW in their
    fused form, where all ranks share memory and the compiled kernel has the bits of this torch,
    unless gradients are clipped: their norms, also where they are only logged, may differ in the
    last bits. The result is also False if a rank has more threads than there are ranks: the kernel
    uses one of them, so that each would compute longer than with torch's own step.
    """
    return all(allgather_object(_can_share(optimizer), name=name))


def _can_share(optimizer: torch.optim.Optimizer) -> bool:
    kind: type = type(optimizer)
    slices = context.current().world.communicator.slices()
    if slices is None or slices.owners == 1 or slices.nodes > 1 or not slices.in_tree:
        return False
    if torch.get_num_threads() > slices.owners:
        return False
    parameters = parameters_of(optimizer)
    if not all(p.is_cpu and p.dtype in TYPES and _has_own_memory(p) for p in parameters):
        return False
    storages = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    if len(storages) < len(parameters) or find_form(kind) is None:
        return False
    return all(kernel_rule(kind, group) is not None for group in optimizer.param_groups)


def _has_own_memory(parameter: torch.nn.Parameter) -> bool:
    return parameter.untyped_storage().nbytes() == parameter.nbytes > 0


class FusedUpdate:
    """The sums and the step of this rank's segments; boards have factors of gradients."""

    @collective
    def __init__(self, kind: type, buckets: ParameterBuckets, owners: NodeOwners) -> None:
        self._kind, self._buckets, self._slices = kind, buckets, owners.slices
        form = find_form(kind) if owners.slices.in_tree else None
        forms = allgather_object(form, f"form of {owners.name}", owners.channel)
        self._form = form if all(each == form for each in forms) else None
        self.boards: list[npt.NDArray[np.float64]] = []
        if self._form is not None:
            copies = owners.find_memory(8, "factors")
            self.boards = [copy.view(np.float64) for copy in copies or ()]

    def use(self, steps: SegmentSteps, weights: WeightMemory) -> None:
        """Update the segments of a new plan from now on, if all ranks can."""
        self._steps, self._specs = steps, self._buckets.plan.specs
        self._state: TorchStateMemory | None = None
        self._rules: list[KernelRule] = []
        if self._form is None or not self.boards:
            return
        taken = [s for s in steps.owned.values() if self._specs[s.parameter].dtype in KERNEL_TYPES]
        self.parameters = {segment.parameter: number for number, segment in enumerate(taken)}
        places = [self._place(s, steps.groups[s.parameter], self._form, weights) for s in taken]
        self._step = KernelStep(places, len(self.boards), self._slices.number, self._form)
        self._in_buckets = self._step.gradients.copy()
        staying = self._buckets.staying
        self._places = None if staying is None else staying.places
        self._pieces = None if self._places is None else self._cut(self._places)

    @property
    def takes_all(self) -> bool:
        """Whether the kernel takes all segments, the same on all ranks."""
        return all(spec.dtype in KERNEL_TYPES for spec in self._specs)

    def prepare(self, state: TorchStateMemory) -> bool:
        """Use the present settings, and memory for the state; return whether the kernel can."""
        if not self.boards:
            return False
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

    def _use_state(self, state: TorchStateMemory) -> None:
        for index, number in self.parameters.items():
            slots = {name: slot.data_ptr() for name, slot in state.slots(index).items()}
            steps = slots.pop("step", 0)
            names = [name for name in STATES[self._kind] if name in slots]
            self._step.use_state(number, [slots[name] for name in names], steps)

    def update(self, factor: float, kept: bool) -> None:
        """Update the weights on all ranks."""
        assert self._state is not None
        self._step.update(self._rules, self._select(self._state, kept), factor)

    def sum(self) -> float:
        """Sum the gradients of this rank's segments; return the sum of their squares."""
        return self._step.sum(self._select(None, kept=False))

    def _select(self, state: TorchStateMemory | None, kept: bool) -> Scales | None:
        """Choose what the kernel takes, with its state for a step; return factors as _scales()."""
        used = set(self._steps.used) & self.parameters.keys()
        for index, number in self.parameters.items():
            begins = False
            if state is not None and index in used:
                begins = state.begin(index, self._steps.entry(index))
            self._step.select(number, index in used, begins)
        scales = self._scales()
        gradients = {} if scales else {i: self._steps.gradient(i, kept) for i in used}
        if self._places is None or self._pieces is None:
            self._step.gradients[:] = self._in_buckets
        else:
            self._step.gradients[:] = self._places.addresses(self._pieces)
        for index, gradient in gradients.items():
            self._step.set_sum(self.parameters[index], gradient.data_ptr())
        return scales

    def _scales(self) -> Scales | None:
        """Return the factors of the gradients; None if they are summed."""
        exchange = self._buckets.sharded
        if exchange is None or not exchange.pending:
            return None
        return Scales([float(board[0]) for board in self.boards], exchange.scales[1])

    def _cut(self, places: GradientPlaces) -> Pieces:
        """Return the segments that the kernel takes as pieces of gradients."""
        rows = []
        for index in self.parameters:
            segment, size = self._steps.owned[index], self._specs[index].dtype.itemsize
            bucket = places.offset(self._buckets.buffers[segment.bucket])
            in_memory = bucket + segment.start * size
            rows.append((index, segment.first * size, in_memory, segment.count))
        return Pieces.of(rows)

    def _place(self, segment: Segment, group: int, form: Form, weights: WeightMemory) -> Place:
        spec = self._buckets.plan.specs[segment.parameter]
        size = spec.dtype.itemsize
        copies = self._slices.copies(self._buckets.memory["cpu"])
        assert copies is not None  # as when the slices were found
        bases = [copy.ctypes.data for copy in copies]
        buffer = self._buckets.buffers[segment.bucket]
        offset = buffer.pointer + segment.start * size - bases[self._slices.number]
        return Place(
            [base + offset for base in bases],
            weights.addresses(segment),
            segment.count,
            form.rest(spec.count, segment.first, segment.count, size),
            group,
            spec.dtype is DType.FLOAT64,
        )
