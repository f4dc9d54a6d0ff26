"""The optimizer's step that the ranks of a node take together, in memory that all of them read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core import context
from hvdtrain.core.gradients.plan import ParameterSpec
from hvdtrain.core.objects import allgather_object
from hvdtrain.core.places import GradientPlaces, Pieces
from hvdtrain.core.sharding.exchange import KERNEL_TYPES
from hvdtrain.core.sharding.owners import NodeOwners
from hvdtrain.core.sharding.segments import Quantity
from hvdtrain.core.update_kernel import Form, KernelRule, KernelStep, Scales
from hvdtrain.engines.communicator import Slices
from hvdtrain.errors import UnsupportedError
from hvdtrain.torch.buckets import ParameterBuckets
from hvdtrain.torch.kernel_step import STATES, TYPES, find_form, kernel_rule
from hvdtrain.torch.operations.parts import parameters_of
from hvdtrain.torch.operations.routes import from_buffer
from hvdtrain.torch.sharding.segment_optimizer import quantities_of
from hvdtrain.torch.sharding.state_memory import Entry, TorchStateMemory
from hvdtrain.torch.sharding.update import OwnerUpdate, power_sum
from hvdtrain.types import DType, ReduceOp


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


_ALIGNMENT_BYTES = 128


class NodeUpdate(OwnerUpdate):
    """Takes the step for all ranks of the node.

    Each rank has its own copy of all weights, in memory that all of them access: `p.data` becomes a
    view of it.

    Where the compiled kernel has the bits of torch's fused optimizer, gradients are left in their
    buckets until the step, which sums them in the same pass.
    """

    _slices: Slices
    _memory: TorchStateMemory

    @collective
    def __init__(
        self, optimizer: torch.optim.Optimizer, buckets: ParameterBuckets, slices: Slices
    ) -> None:
        super().__init__(optimizer, buckets, slices)
        owners = self._owners = NodeOwners(buckets.channel, slices, buckets.name)
        specs = buckets.plan.specs
        _check_memory(self._parameters, specs)
        lengths = [-(-spec.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for spec in specs]
        places = list(zip(accumulate(lengths, initial=0), specs, strict=False))
        copies = owners.find_memory(max(1, sum(lengths)), "weights")
        self.shared = copies is not None
        if copies is None:
            return
        copies.insert(0, copies.pop(owners.number))
        # All weights of each rank, of this one first.
        self._weights = [
            [Buffer.of(copy[first : first + s.nbytes]).view(s.dtype) for first, s in places]
            for copy in copies
        ]
        self._elements = [from_buffer(buffer) for buffer in self._weights[0]]
        self._move_weights()
        self._settings: object = None
        kind: type = type(optimizer)
        self._kind = kind
        form = find_form(kind) if slices.in_tree else None
        forms = allgather_object(form, f"form of {owners.name}", owners.channel)
        self._form = form if form is not None and all(each == form for each in forms) else None
        # Of each rank's gradients the factor; none where the kernel takes no step.
        self._boards: list[npt.NDArray[np.float64]] = []
        if self._form is not None:
            boards = owners.find_memory(8, "factors")
            self._boards = [board.view(np.float64) for board in boards or ()]
        self._takes_all = all(spec.dtype in KERNEL_TYPES for spec in specs)

    def _move_weights(self) -> None:
        """Move weights into the memory whose parameter has another one, with their values."""
        specs = self.buckets.plan.specs
        for parameter, own, spec in zip(self._parameters, self._weights[0], specs, strict=True):
            if parameter.data_ptr() == own.pointer or not spec.count:
                continue
            weights = parameter.detach()
            # Not of `_elements`, which would move with p.data.share_memory_().
            view = from_buffer(own).as_strided(spec.shape, spec.strides)
            if weights.shape != view.shape or weights.dtype != view.dtype or not weights.is_cpu:
                raise UnsupportedError(
                    f"sharded=True: parameter {spec.name!r} was {view.dtype} {tuple(view.shape)} "
                    f"on the CPU and is {weights.dtype} {tuple(weights.shape)} on {weights.device} "
                    "now: wrap the optimizer again"
                )
            view.copy_(weights)
            parameter.data = view

    @collective
    def step(self, kept: bool) -> None:
        fused = self._prepare_kernel()
        if not fused or (self._factor != 1.0 and not self._takes_all):
            self.settle()  # what the kernel does not take is scaled, too
        used = self._step_on_segments(kept, self._in_kernel if fused else ())
        for index in used:
            self._memory.keep(index, self._inner.state[self._tensors[index]])
        pairs = []
        for segment in map(self._owned.__getitem__, used):
            own, *others = [each[segment.parameter] for each in self._weights]
            part = segment.first, segment.count
            pairs += [(own.slice(*part), other.slice(*part)) for other in others]
        self._owners.put("weights", pairs, partial(self._step_in_kernel, kept) if fused else None)
        # Autograd does not see who writes; a graph with the old weights must not be used again.
        changed = [parameter for parameter in self._parameters if parameter.grad is not None]
        torch.autograd.graph.increment_version(changed)
        self._exchange.pending.clear()
        self._factor = 1.0
        defers = fused and self._slices.nodes == 1
        self._exchange.defer_to(self._boards[self._owners.number] if defers else None)

    def _cut(self) -> Mapping[int, torch.Tensor]:
        self._settings = None  # as of no plan
        return {i: self._elements[i][segment.in_parameter] for i, segment in self._owned.items()}

    @collective
    def _prepare(self) -> None:
        self._follow_plan()
        # The optimizer's state depends on which settings are on. Rates may change from and to 0 in
        # any step, and are left out.
        settings = [
            {
                key: bool(value)
                for key, value in group.items()
                if value is None or isinstance(value, bool) or key == "momentum"
            }
            for group in self._optimizer.param_groups
        ]
        if settings != self._settings:
            # Change the state only when all ranks have read it and have come here to allocate.
            self.give_back()
            if self._settings is None and self._form is not None and self._boards:
                self._open_kernel(self._form)
            specs, quantities = self.buckets.plan.specs, self._quantities()
            self._memory = TorchStateMemory(self._owners, self._segments, quantities, specs)
            self._settings = settings
            pairs = zip(specs, quantities, strict=True)
            self._fits = bool(self._boards) and all(self._can_keep(s.dtype, q) for s, q in pairs)
            if self._fits:
                self._use_state()
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
        self._memory.clear()
        super()._take()

    def _keep(self, index: int, entry: Entry) -> Entry:
        kept, quantities = dict(entry), self._memory.quantities[index]
        for name, value in entry.items():
            if isinstance(value, torch.Tensor) and quantities[name].elementwise:
                kept[name] = self._part_of(index, value)
        self._memory.keep(index, kept)
        return kept

    def _whole_state(self) -> Mapping[int, Entry]:
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
        if self._prepare_kernel() and kind == 2.0 and self._factor == 1.0 and self._takes_all:
            scales, _held = self._select(in_step=False, kept=False)
            total = self._kernel.sum(scales)
            self._exchange.pending.clear()
            return total
        self.settle()
        return float(power_sum(self._own_gradients(), kind, torch.device("cpu")))

    def _open_kernel(self, form: Form) -> None:
        """Have the kernel update the segments of a new plan."""
        buckets, specs, number = self.buckets, self.buckets.plan.specs, self._slices.number
        copies = self._slices.copies(buckets.memory["cpu"])
        assert copies is not None  # as when the slices were found
        bases = np.array([copy.ctypes.data for copy in copies], np.uint64)
        taken = [s for s in self._owned.values() if specs[s.parameter].dtype in KERNEL_TYPES]
        self._in_kernel = {s.parameter: place for place, s in enumerate(taken)}
        sizes = [specs[segment.parameter].dtype.itemsize for segment in taken]
        pairs = list(zip(taken, sizes, strict=True))
        starts = [buckets.buffers[s.bucket].pointer + s.start * size for s, size in pairs]
        offsets = np.array(starts, np.uint64) - bases[number]
        self._in_buckets = bases + offsets.reshape(-1, 1)
        weights = [
            [each[s.parameter].pointer + s.first * size for each in self._weights]
            for s, size in pairs
        ]
        self._kernel = KernelStep(
            np.array(weights, np.uint64).reshape(-1, len(bases)),
            form,
            number,
            count=[segment.count for segment in taken],
            rest=[form.rest(specs[s.parameter].count, s.first, s.count, z) for s, z in pairs],
            rule=[self._groups[segment.parameter] for segment in taken],
            is_double=[specs[segment.parameter].dtype is DType.FLOAT64 for segment in taken],
        )
        self._places: GradientPlaces | None = None
        if buckets.staying is not None:
            places = self._places = buckets.staying.places
            in_memory = [places.offset(buckets.buffers[s.bucket]) + s.start * z for s, z in pairs]
            rows = zip(taken, sizes, in_memory, strict=True)
            self._pieces = Pieces.of([(s.parameter, s.first * z, m, s.count) for s, z, m in rows])

    def _can_keep(self, dtype: DType, quantities: Mapping[str, Quantity]) -> bool:
        """Return whether the kernel knows a parameter's state, or does not take the parameter."""
        return dtype not in KERNEL_TYPES or all(
            (quantity.dtype is dtype and quantity.elementwise)
            if name in STATES[self._kind]
            else (name, quantity.dtype) == ("step", DType.FLOAT32)
            for name, quantity in quantities.items()
        )

    def _use_state(self) -> None:
        for index, place in self._in_kernel.items():
            slots = {name: slot.data_ptr() for name, slot in self._memory.slots[index].items()}
            addresses = [slots.get(name, 0) for name in STATES[self._kind]]
            segment = self._kernel.segments[place]
            segment["state"][: len(addresses)] = addresses
            segment["steps"] = slots.get("step", 0)

    @collective
    def _prepare_kernel(self) -> bool:
        """Prepare for a step, and return whether the kernel takes part in it."""
        self._prepare()
        self._move_weights()
        if not self._fits:
            return False
        rules = [kernel_rule(self._kind, group) for group in self._follow_settings()]
        self._rules: list[KernelRule] = [rule for rule in rules if rule is not None]
        return len(self._rules) == len(rules)

    def _step_in_kernel(self, kept: bool) -> None:
        scales, _held = self._select(in_step=True, kept=kept)
        self._kernel.update(self._rules, scales, self._factor)

    def _select(self, in_step: bool, kept: bool) -> tuple[Scales, list[torch.Tensor]]:
        """Choose what the kernel takes, with its state in a step.

        Return factors of the gradients, None if these are summed, and tensors that must exist until
        the kernel has read them.
        """
        exchange, kernel, used = self._exchange, self._kernel, set(self._used)
        skipped, begins = kernel.segments["skipped"], kernel.segments["begins"]
        for index, place in self._in_kernel.items():
            skipped[place], begins[place] = index not in used, False
            if in_step and index in used:
                entry = self._inner.state[self._tensors[index]]
                begins[place] = self._memory.begin(index, entry)
        if self._places is None:
            kernel.gradients[:] = self._in_buckets
        else:
            kernel.gradients[:] = self._places.addresses(self._pieces)
        if exchange.pending:
            return ([float(board[0]) for board in self._boards], exchange.scales[1]), []
        gradients = {i: self._gradient(i, kept) for i in self._in_kernel if i in used}
        for index, gradient in gradients.items():
            kernel.gradients[self._in_kernel[index], self._slices.number] = gradient.data_ptr()
        return None, list(gradients.values())


def _check_memory(parameters: Sequence[torch.nn.Parameter], specs: Sequence[ParameterSpec]) -> None:
    """Check that nothing else refers to the memory of the parameters, which they leave."""
    owners: dict[int, str] = {}
    for parameter, spec in zip(parameters, specs, strict=True):
        if spec.device != "cpu" or spec.dtype.value != spec.kind:
            raise UnsupportedError(
                f"sharded=True: parameter {spec.name!r} is {spec.kind} on {spec.device}, and only "
                "parameters on the CPU whose gradients are reduced in their own type can be "
                "shared: use sharded=False"
            )
        storage = parameter.untyped_storage()
        other = owners.setdefault(storage.data_ptr(), spec.name) if spec.count else spec.name
        if other != spec.name or storage.nbytes() != spec.nbytes:
            what = "a larger tensor" if other == spec.name else f"parameter {other!r}"
            raise UnsupportedError(
                f"sharded=True: parameter {spec.name!r} shares its memory with {what}, but "
                "weights move to memory of the node: give it memory of its own, p.data = "
                "p.data.clone(), or use sharded=False"
            )
