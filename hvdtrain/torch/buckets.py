"""Buckets of PyTorch parameters, and the gradients that are views of them, or copies."""

from __future__ import annotations

import math
import os
import warnings
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hvdtrain.buffer import Buffer, Elements
from hvdtrain.collective import collective
from hvdtrain.core import context
from hvdtrain.core.agreement.channel import Channel, Submission
from hvdtrain.core.agreement.operation import Operation
from hvdtrain.core.bucket_plans import (
    agree_on_change,
    agree_on_plan,
    open_plan_channel,
    placed_buckets,
)
from hvdtrain.core.compression import Compressor
from hvdtrain.core.gradient_settings import GradientSettings, group_indices
from hvdtrain.core.gradients.communicators import open_communicators
from hvdtrain.core.gradients.plan import Bucket, BucketPlan, ParameterSpec, bucket_memory, cut
from hvdtrain.core.gradients.reducer import Reducer
from hvdtrain.core.gradients.step import usage_length, write_usage
from hvdtrain.core.objects import allgather_object
from hvdtrain.streams import HOST, Several, Streams
from hvdtrain.topology import RankCores, fill_cores
from hvdtrain.torch.operations.routes import (
    as_buffer,
    dtype_of,
    from_buffer,
    is_dense,
    is_plain,
    page_lock,
    streams_of,
    wire_type,
)
from hvdtrain.types import DType

if TYPE_CHECKING:
    from hvdtrain.core.places import PlacedBucket
    from hvdtrain.core.sharding.exchange import ShardedExchange
    from hvdtrain.torch.allocator import Staying


@dataclass(frozen=True)
class ParameterSettings(GradientSettings):
    """How gradients of PyTorch parameters are reduced."""

    passes: int = 1
    compressor: type[Compressor] | None = None
    sharded: bool = False
    shares_whole: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.passes < 1:
            raise ValueError(f"backward_passes_per_step must be at least 1, got {self.passes}")


Named = Sequence[tuple[str, torch.nn.Parameter]]


# Larger gradients do not stay in the caches until they are reduced.
_LARGE_BYTES = 256 << 10


class ParameterBuckets(Reducer):
    """Reduces by a plan that all ranks have agreed on for parameters' current dtypes and devices.

    It has the memory of the buckets. After take(), a gradient is a view of its bucket if the bucket
    is on its device. Other gradients are copied, as are those of half types that are reduced in
    float32 and those computed by backward(create_graph=True).
    """

    @collective
    def __init__(self, named: Named, settings: ParameterSettings) -> None:
        parent, exchange = settings.process_set.channel(), settings.make_exchange()
        capabilities = parent.communicator.capabilities
        self.named, self._halves = named, capabilities.half_types and exchange.half_types
        self._parameters = parameters = [parameter for _, parameter in named]
        self._dtypes = [parameter.dtype for parameter in parameters]
        groups = group_indices(settings.groups, parameters)
        plan = agree_on_plan([_spec(*pair, self._halves) for pair in named], parent, groups)
        exchange.prepare(plan)
        channel, here = open_plan_channel(parent), context.current()
        name = f"plan {here.next_number(channel)}"
        devices: dict[str, list[torch.device]] = {}  # of each type
        for device in dict.fromkeys(parameter.device for parameter in parameters):
            devices.setdefault(device.type, []).append(device)
        # Several of a type have the order of the host.
        self.streams_of = {
            kind: streams_of(found[0], capabilities) if len(found) == 1 else HOST
            for kind, found in devices.items()
        }
        self.memory = memory = _allocate(channel, plan, name, devices, self.streams_of)
        self.sharded: ShardedExchange | None = None
        shares = settings.sharded or settings.shares_whole
        if shares:
            from hvdtrain.core.sharding.exchange import ShardedExchange, owned_slices

            slices = owned_slices(channel, memory)
            if slices is not None:
                total = settings.op, settings.predivide
                exchange = self.sharded = ShardedExchange(slices, *total, settings.shares_whole)
        # Ranks whose exchanges differ find that out in the first step.
        suitable = exchange.in_place and settings.compressor is None
        self.staying: Staying | None = None
        if channel.communicator.slices() is not None:
            from hvdtrain.torch.allocator import open_staying

            self.staying = open_staying(channel, plan, memory, suitable, name)
        reducer = here, channel, exchange, name, plan, *self._divided(plan)
        super().__init__(*reducer, numbers=usage_length(len(parameters)), counted=True)
        # Ranks whose exchanges differ take part, too.
        self.together = _go_together(parent, memory) and not shares and exchange.in_place
        if exchange.hierarchical:
            from hvdtrain.core.warnings_once import note_one_node

            node = here.topology.node
            note_one_node(exchange, open_communicators(channel, exchange.spec, node, name))
        self._compressor = settings.compressor
        self._contexts: dict[int, object] = {}  # of what it has compressed
        self._misfits: set[int] = set()  # their gradients had another memory format
        # Gradients outside the buckets that hold the last result.
        self._copies: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self._copied_at: dict[int, int] = {}  # versions of those that are copies of results
        # Gradients not reduced yet that are no views, with their versions.
        self._lent: dict[int, tuple[torch.Tensor, int]] = {}
        self._warned = False
        self.forget_changes()
        self._cut()

    def _divided(
        self, plan: BucketPlan
    ) -> tuple[list[Buffer], list[Streams], list[PlacedBucket | None] | None]:
        """Divide the memory into the buckets of a plan; return what the reducer needs of each."""
        buffers = cut(plan.buckets, self.memory)
        streams = [self.streams_of[bucket.device] for bucket in plan.buckets]
        if self.staying is None:
            return buffers, streams, None
        from hvdtrain.core.places import PlacedBucket

        place = partial(PlacedBucket, self.staying.places)
        return buffers, streams, placed_buckets(plan, buffers, place)

    def refuse_capture(self) -> None:
        """Refuse to become part of a graph that a device of the parameters is capturing."""
        for streams in self.streams_of.values():
            streams.refuse_capture("an optimizer step")

    @collective
    def run(self, operation: Operation) -> Any:
        """Run an operation on buckets' memory in the order of their streams, which wait for it."""
        streams = Several(list(dict.fromkeys(self.streams_of.values())) or [HOST])
        return Submission(self.channel, operation).after(streams).run()

    @property
    def whole(self) -> bool:
        """Whether all ranks have the whole results of the last step."""
        return self.sharded is None or self.sharded.whole

    @collective
    def sum_slices(self) -> None:
        """Sum the slices of this rank whose sums were left to the optimizer's step."""
        sharded = self.sharded
        if sharded is not None and sharded.pending:
            chosen = [(self.buffers[n], self.placed[n]) for n in sorted(sharded.pending)]
            name = f"sums of {self.name}"
            self.run(sharded.on_slices(chosen, name, sharded.scales))
            sharded.pending.clear()

    @collective
    def spread_slices(self) -> None:
        """Give all ranks the reduced gradients of all slices."""
        self.sum_slices()
        if self.sharded is not None:
            pairs = list(zip(self.buffers, self.placed, strict=True))
            self.run(self.sharded.on_slices(pairs, f"gradients of {self.name}"))

    def use_plan(self, plan: BucketPlan) -> None:
        """Switch to another plan for the same parameters, from the next step on."""
        kept = self.kept()
        self.exchange.prepare(plan)
        self.use(plan, *self._divided(plan))
        self._cut()
        self.restore(kept)

    def write_usage(
        self,
        absent: Iterable[int],
        sparse: Iterable[int],
        arrivals: Sequence[int] | None,
    ) -> None:
        """Write what ranks sum in addition to this rank's gradients."""
        named, specs = self.named, self.plan.specs
        self._misfits = {i for i in self._misfits if _spec(*named[i], self._halves) != specs[i]}
        write_usage(self.numbers, absent, sparse, arrivals, bool(self._misfits))

    @collective
    def changed_dtypes(self) -> bool:
        """Return whether dtypes of parameters have changed, after all ranks have agreed on that."""
        if [parameter.dtype for _, parameter in self.named] == self._dtypes:
            return False
        change = next(
            f"{name!r} from {kept} to {parameter.dtype}"
            for (name, parameter), kept in zip(self.named, self._dtypes, strict=True)
            if parameter.dtype != kept
        )
        agree_on_change(self.channel, self.name, change)
        return True

    def _cut(self) -> None:
        """Make the views of all buckets."""
        # With versions of their own: the channel's thread writes into the buffers, perhaps by
        # torch, and buckets may be parts of one tensor.
        memories = [from_buffer(buffer).data for buffer in self.buffers]
        self._parts: dict[int, torch.Tensor] = {}
        for bucket, memory in zip(self.plan.buckets, memories, strict=True):
            for index, start in zip(bucket.parameters, bucket.starts, strict=True):
                spec, first = self.plan.specs[index], memory.storage_offset() + start
                self._parts[index] = memory.as_strided(spec.shape, spec.strides, first)
        # Where gradients lie in this step: in their parts of the buckets, or elsewhere.
        self._views = dict(self._parts)
        self._addresses = {index: part.data_ptr() for index, part in self._parts.items()}

    def _streams_of(self, index: int) -> Streams:
        return self.streams[self.plan.bucket_of[index]]

    def fill(self, index: int) -> None:
        """Copy a parameter itself into its bucket, where ranks exchange weights."""
        self._streams_of(index).fill(self._parameters[index].detach(), self._parts[index])

    def read(self, index: int) -> None:
        """Copy it back."""
        self._streams_of(index).read(self._parts[index], self._parameters[index].detach())

    def _follow(self, index: int) -> None:
        """Make the views again if the program has moved their memory, as share_memory_() does.

        That replaces the memory of all tensors of a storage, but not that of the buckets.
        """
        if self._parts[index].data_ptr() != self._addresses[index]:
            elsewhere = self.elsewhere()
            self._cut()
            self._views.update(elsewhere)

    def kept(self) -> dict[int, tuple[torch.Tensor, bool]]:
        """Return copies of results in buckets, and whether they are gradients, for restore()."""
        found = {}
        for index, view in self._views.items():
            is_gradient = self.holds(index)
            # A staged copy is no longer needed, and the device may still be reading its source.
            same_device = view.device == self._parameters[index].device
            if is_gradient or (same_device and self._is_copy(index)):
                found[index] = view.clone(), is_gradient
        return found

    def restore(self, results: dict[int, tuple[torch.Tensor, bool]]) -> None:
        """Copy results back into their buckets."""
        for index, (result, is_gradient) in results.items():
            self._parts[index].copy_(result)
            self._leave_to_bucket(index)
            if is_gradient:
                self._set_gradient(index)

    def _leave_to_bucket(self, index: int) -> None:
        """Say that the gradient of a parameter is in its bucket."""
        if self.staying is not None:
            self.staying.places.put(index, None)

    def _set_gradient(self, index: int) -> None:
        # Not the view itself: `p.grad.data = ...` would detach it from the bucket.
        self._parameters[index].grad = self._views[index].detach()

    def holds(self, index: int) -> bool:
        """Return whether a parameter's gradient is where it is reduced."""
        gradient, view = self._parameters[index].grad, self._views[index]
        return (
            gradient is not None
            and not gradient.is_sparse
            and gradient.dtype == view.dtype  # all tensors without elements have one address
            and gradient.data_ptr() == view.data_ptr()
        )

    def _can_be_view(self, index: int) -> bool:
        parameter, view = self._parameters[index], self._views[index]
        same_device = parameter.is_cpu if view.is_cpu else parameter.device == view.device
        return same_device and parameter.dtype == view.dtype

    def is_taken(self, index: int) -> bool:
        """Return whether a parameter's gradient is the one that was taken for the last step."""
        gradient = self._parameters[index].grad
        if gradient is None:
            return False
        copy = self._copies.get(index)
        return (
            self.holds(index)
            or (copy is not None and gradient.data_ptr() == copy.data_ptr())
            or (index in self._lent and gradient is self._lent[index][0])
        )

    def elsewhere(self) -> dict[int, torch.Tensor]:
        """Return the gradients outside the buckets that other ranks use there."""
        pairs = self._views.items()
        return {index: view for index, view in pairs if view is not self._parts[index]}

    def _has_left(self, index: int) -> bool:
        """Return whether a gradient that other ranks use outside the buckets was moved."""
        view = self._views[index]
        if self.staying is None or view is self._parts[index]:
            return False
        return self.staying.arena.offset(view.data_ptr()) is None

    def drop(self) -> None:
        """Remove the gradients that were taken."""
        for index in self._views:
            if self.is_taken(index):
                self._parameters[index].grad = None

    def stays(self, index: int, incoming: torch.Tensor | None) -> bool:
        """Let a gradient stay where it is, if it can be reduced there."""
        if self.staying is None:
            return False
        parameter, part = self._parameters[index], self._parts[index]
        allocator, arena, places = self.staying
        # No name for the gradient here: references to it are counted.
        address = _address(parameter.grad, part)
        if address is None or part.nbytes < arena.least_bytes:
            return False
        offset = arena.offset(address)
        if offset is None:
            arena.miss(address)
            return False
        if not allocator.is_alone(parameter, incoming):
            return False
        places.put(index, offset)
        assert parameter.grad is not None
        self._views[index] = parameter.grad.detach()
        return True

    def elements(self, index: int) -> torch.Tensor:
        """Return the elements of a gradient where they lie, in the order of memory, 1-d."""
        view = self._views[index]
        return view.as_strided((view.numel(),), (1,))

    def leave_to_program(self) -> None:
        """Leave gradients outside the buckets to the program, when no rank uses them any more."""
        for index in self.elsewhere():
            gradient = self._parameters[index].grad
            if gradient is not None and self.holds(index):
                self._copies[index] = gradient
                self._copied_at.pop(index, None)
            self._views[index] = self._parts[index]

    def take(self, index: int, gradient: torch.Tensor | None) -> None:
        """Copy a dense gradient into its bucket, and make it a view if possible."""
        self._follow(index)
        view = self._views[index] = self._parts[index]
        self._lent.pop(index, None)
        self._leave_to_bucket(index)
        if gradient is None:
            self._streams_of(index).clear(view)
            if self._compressor is not None:
                zeros = torch.zeros_like(view)
                _, self._contexts[index] = self._compressor.compress(zeros)
            return
        compressed = gradient
        if self._compressor is not None:
            compressed, self._contexts[index] = self._compressor.compress(gradient)
        if compressed.data_ptr() != view.data_ptr():
            if compressed.stride() != view.stride():
                self.note_misfit(index)
            self._copy(index, compressed.detach(), view)
        # A gradient with a graph of its own (create_graph) must stay the tensor of that graph.
        if self._can_be_view(index) and not gradient.requires_grad:
            self._set_gradient(index)
            return
        own = self._parameters[index].grad
        if own is not None and not own.is_sparse:
            self._lent[index] = own, own._version

    def is_current(self, index: int) -> bool:
        """Return whether a gradient that was taken is still what the parameter has."""
        gradient = self._parameters[index].grad
        lent, at = self._lent.get(index, (None, 0))
        if lent is not None:
            return gradient is lent and lent._version == at
        return self.holds(index)

    def withdraw(self, index: int, launched: bool) -> torch.Tensor | None:
        """Remove a parameter's gradient; return it, or a copy if it has still to be reduced."""
        gradient = self._parameters[index].grad
        if gradient is not None and not launched and self.holds(index):
            gradient = gradient.clone()
        self._parameters[index].grad = None
        self._lent.pop(index, None)
        return gradient

    def note_misfit(self, index: int) -> None:
        """Note that a gradient had, or may have had, another memory format than its view."""
        self._misfits.add(index)

    def _copy(self, index: int, gradient: torch.Tensor, view: torch.Tensor) -> None:
        equal = gradient.dtype == view.dtype and view.is_contiguous() and is_plain(gradient)
        if equal and view.is_cpu and gradient.is_cpu and view.nbytes >= _LARGE_BYTES:
            self.channel.communicator.put(as_buffer(gradient), as_buffer(view))
        else:
            self._streams_of(index).fill(gradient, view)

    def lend(self, buckets: Sequence[Bucket]) -> None:
        """Replace gradients that are being reduced by copies, which the program may write."""
        for index in (index for bucket in buckets for index in bucket.parameters):
            parameter, view = self._parameters[index], self._views[index]
            if parameter.grad is None or parameter.grad.is_sparse or index in self._lent:
                continue
            if self.holds(index):
                parameter.grad = view.clone()
            self._lent[index] = parameter.grad, parameter.grad._version

    def deliver(self, buckets: Sequence[Bucket], sparse: Collection[int]) -> None:
        """Set the gradients of parameters to the reduced ones."""
        for index in (index for bucket in buckets for index in bucket.parameters):
            self._follow(index)
            if self._has_left(index):
                raise RuntimeError(
                    f"the gradient of {self.plan.specs[index].name!r} was moved to other "
                    "memory between backward() and step(), as share_memory() does, before it was "
                    "reduced: call optimizer.synchronize() before, and step() within `with "
                    "optimizer.skip_synchronize():`"
                )
            if (compressor := self._compressor) is not None and hasattr(compressor, "decompress"):
                part = self._parts[index]
                part.copy_(compressor.decompress(part, self._contexts.pop(index)))
            parameter = self._parameters[index]
            gradient = parameter.grad
            lent = self._lent.pop(index, None)
            if gradient is None or self.holds(index) or index in sparse:
                continue
            if lent is not None:
                self._take_back(index, gradient, *lent)
                continue
            if gradient.is_sparse:
                gradient = parameter.grad = torch.empty_like(parameter)
            self._copy_result(index, gradient)

    def _take_back(self, index: int, gradient: torch.Tensor, lent: torch.Tensor, at: int) -> None:
        """Replace the copy that was lent, at this version, by the reduced gradient."""
        if not self._warned and (gradient is not lent or lent._version != at):
            self._warned = True
            warnings.warn(
                "a gradient was changed between backward() and step() before it was reduced, "
                "because another rank was executing another operation; the change is lost. Call "
                "optimizer.synchronize() before changing gradients, and step() within "
                "`with optimizer.skip_synchronize():`",
                stacklevel=2,
            )
        if self._can_be_view(index) and not gradient.requires_grad:
            self._set_gradient(index)
        else:
            self._copy_result(index, gradient)

    def _copy_result(self, index: int, gradient: torch.Tensor) -> None:
        """Write a reduced gradient into one that is no view."""
        self._streams_of(index).read(self._views[index], gradient.detach())
        self._copies[index], self._copied_at[index] = gradient, gradient._version

    def _is_copy(self, index: int) -> bool:
        """Return whether a parameter's gradient is what _copy_result() has left."""
        gradient = self._parameters[index].grad
        return (
            gradient is not None
            and gradient is self._copies.get(index)
            and gradient._version == self._copied_at.get(index)
        )

    def give(self, indices: Iterable[int]) -> None:
        """Set the gradients of parameters that had none here to the reduced ones."""
        for index in indices:
            parameter = self._parameters[index]
            parameter.grad = self._views[index].detach().to(parameter.device, parameter.dtype)

    def forget_changes(self) -> None:
        """Prepare to note what the backward passes of the next step leave."""
        self.arriving = True  # gradients, so that changes cannot be found
        self._changed: int | None = None  # as changed() returns it
        self._noted: dict[int, tuple[torch.Tensor, int, int]] = {}

    def note(self, complete: Iterable[int] | None = None) -> None:
        """Note these gradients, or all, as a backward pass has left them."""
        self.arriving, self._noted = False, {}
        for index in range(len(self._parameters)) if complete is None else complete:
            gradient = self._parameters[index].grad
            if gradient is not None:
                self._noted[index] = gradient, gradient._version, _place(gradient)

    def look(self, complete: Iterable[int], arriving: int) -> None:
        """Look for changes since note() when another backward pass brings its first gradient.

        A backward pass itself writes into the buckets.
        """
        if not self.arriving:
            self.arriving = True
            if self._changed is None:
                self._changed = self._find_changed(complete, arriving)

    def changed(self, complete: Iterable[int]) -> int | None:
        """Return a parameter whose gradient the program has changed; None if it has changed none.

        It may be another one of the same bucket. Gradients that were removed do not count.
        """
        return self._find_changed(complete) if self._changed is None else self._changed

    def _find_changed(self, complete: Iterable[int], arriving: int | None = None) -> int | None:
        filling = None  # which bucket a backward pass is writing
        if arriving is not None and self.holds(arriving):
            filling = self.plan.bucket_of[arriving]
        for index in complete:
            gradient, noted = self._parameters[index].grad, self._noted.get(index)
            if gradient is None:
                continue
            if noted is None:
                # The end of a compiled backward pass is not reported if a gradient is missing.
                if not self.is_current(index):
                    return index
                continue
            kept, version, place = noted
            if self.holds(index):  # perhaps as another tensor of the same memory
                replaced = self._has_left(index)
            else:
                replaced = gradient is not kept or _place(gradient) != place
            if replaced or (self.plan.bucket_of[index] != filling and kept._version != version):
                return index
        return None


def _spec(name: str, parameter: torch.nn.Parameter, halves: bool) -> ParameterSpec:
    """Return what a plan needs to know about a parameter as it is now."""
    # With a gradient in the parameter's memory format, the optimizer traverses both linearly.
    dense = parameter if is_dense(parameter) else parameter.detach().contiguous()
    own = dtype_of(parameter)
    return ParameterSpec(
        name=name,
        shape=tuple(parameter.shape),
        strides=tuple(dense.stride()),
        dtype=own if halves else DType(str(wire_type(parameter.dtype)).removeprefix("torch.")),
        kind=own.value,
        device=parameter.device.type,
    )


@collective
def _allocate(
    channel: Channel,
    plan: BucketPlan,
    name: str,
    devices: Mapping[str, Sequence[torch.device]],
    streams: Mapping[str, Streams],
) -> Mapping[str, Elements]:
    """Allocate memory for the parameters on each type of device.

    It is host memory for a device that the engine does not support, and for several devices of one
    type, because a bucket is on one device.
    """
    taken = channel.communicator.capabilities.devices
    places = {
        kind: str(*found) if kind in taken and len(found) == 1 else "cpu"
        for kind, found in devices.items()
    }
    memory = bucket_memory(channel, plan, name, places)
    for kind, elements in memory.items():
        if places[kind] == "cpu" and kind != "cpu":
            from hvdtrain.core.warnings_once import note_staging

            note_staging("gradients", str(devices[kind][-1]))
            if kind == "cuda":
                page_lock(elements, channel)
        elif kind == "cuda":
            # Another stream may still use memory that the allocator has just recycled.
            torch.cuda.synchronize(places[kind])
        streams[kind].keep(elements)
        streams[kind].hand_over(elements)
    return memory


@collective
def _go_together(parent: Channel, memory: Mapping[str, Elements]) -> bool:
    """Return whether a thread that reduces during backward() would only take its core."""
    slices = parent.communicator.slices()
    if slices is None or slices.nodes > 1 or set(memory) != {"cpu"}:
        return False
    from hvdtrain.control_groups import cpu_limit, own_groups

    cores, group = frozenset(os.sched_getaffinity(0)), own_groups()
    own = RankCores(parent.communicator.rank, cores, torch.get_num_threads())
    limit = cpu_limit(group) or math.inf
    ranks = allgather_object((own, group, limit), "cores of a bucket plan", parent)
    limits = {group: limit for _, group, limit in ranks}
    return fill_cores([own for own, *_ in ranks], limits)


def _address(gradient: torch.Tensor | None, part: torch.Tensor) -> int | None:
    """Return the address of a gradient that is like its part of the bucket; None for others."""
    if gradient is None or gradient.layout is not torch.strided or gradient.requires_grad:
        return None
    like = gradient.dtype == part.dtype and gradient.stride() == part.stride()
    return gradient.data_ptr() if like and is_plain(gradient) else None


def _place(gradient: torch.Tensor) -> int:
    """Return the address of the memory of a gradient; 0 if it is sparse."""
    return 0 if gradient.is_sparse else gradient.data_ptr()
