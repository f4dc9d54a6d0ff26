"""Buckets of PyTorch parameters, with their memory and views."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from hvdtrain.buffer import Buffer, Elements
from hvdtrain.collective import collective
from hvdtrain.core import context
from hvdtrain.core.agreement.channel import Channel, Submission
from hvdtrain.core.agreement.operation import Operation
from hvdtrain.core.arguments import group_indices
from hvdtrain.core.bucket_plans import agree_on_change, agree_on_plan, open_plan_channel
from hvdtrain.core.gradients.communicators import open_communicators
from hvdtrain.core.gradients.plan import BucketPlan, ParameterSpec, bucket_memory, cut
from hvdtrain.core.gradients.reducer import Reducer
from hvdtrain.core.gradients.step import usage_length, write_usage
from hvdtrain.core.places import PlacedBucket
from hvdtrain.core.sharding.exchange import ShardedExchange, on_slices, owned_slices
from hvdtrain.core.warnings_once import note_one_node, note_staging
from hvdtrain.engines.communicator import Capabilities
from hvdtrain.streams import HOST, Several, Streams
from hvdtrain.torch.gradients.views import (
    BucketViews,
    ParameterSettings,
    open_staying,
    placed_of,
)
from hvdtrain.torch.tensors.dynamo import page_lock
from hvdtrain.torch.tensors.routes import dtype_of, is_dense, wire_type
from hvdtrain.torch.tensors.streams import streams_of
from hvdtrain.types import DType

Named = Sequence[tuple[str, torch.nn.Parameter]]


class ParameterBuckets(Reducer):
    """Reduces by a plan that all ranks have agreed on for parameters' current dtypes and devices.

    It has the memory of the buckets, and the views by which parameters have their gradients there.
    """

    @collective
    def __init__(self, named: Named, settings: ParameterSettings) -> None:
        parent, exchange = settings.process_set.channel(), settings.make_exchange()
        capabilities = parent.communicator.capabilities
        self.named, self._halves = named, capabilities.half_types and exchange.half_types
        parameters = [parameter for _, parameter in named]
        self._dtypes = [parameter.dtype for parameter in parameters]
        groups = group_indices(settings.groups, parameters)
        plan = agree_on_plan([_spec(*pair, self._halves) for pair in named], parent, groups)
        exchange.prepare(plan)
        channel, here = open_plan_channel(parent), context.current()
        name = f"plan {here.next_number(channel)}"
        self.streams_of = _streams_by_type(parameters, capabilities)
        self.memory = memory = _allocate(channel, plan, name, parameters, self.streams_of)
        self.sharded: ShardedExchange | None = None
        shares = settings.sharded or settings.shares_whole
        slices = owned_slices(channel, memory) if shares else None
        if slices is not None:
            total = settings.op, settings.predivide
            exchange = self.sharded = ShardedExchange(slices, *total, settings.shares_whole)
        self.staying = open_staying(channel, plan, exchange, memory, settings, name)
        numbers = usage_length(len(parameters))
        divided = self._divided(plan)
        super().__init__(
            here, channel, exchange, name, plan, *divided, numbers=numbers, counted=True
        )
        if exchange.hierarchical:
            node = here.topology.node
            note_one_node(exchange, open_communicators(channel, exchange.spec, node, name))
        self.views = BucketViews(parameters, channel, settings.compressor, self.staying)
        self.views.cut(plan, self.buffers, self.streams)

    def _divided(
        self, plan: BucketPlan
    ) -> tuple[list[Buffer], list[Streams], list[PlacedBucket | None]]:
        """Divide the memory into the buckets of a plan; return what the reducer needs of each."""
        buffers = cut(plan.buckets, self.memory)
        streams = [self.streams_of[bucket.device] for bucket in plan.buckets]
        return buffers, streams, placed_of(self.staying, plan, buffers)

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
            self.run(on_slices(chosen, sharded.slices, name, sharded.scales))
            sharded.pending.clear()

    @collective
    def spread_slices(self) -> None:
        """Give all ranks the reduced gradients of all slices."""
        self.sum_slices()
        if self.sharded is not None:
            pairs = list(zip(self.buffers, self.placed, strict=True))
            self.run(on_slices(pairs, self.sharded.slices, f"gradients of {self.name}"))

    def use_plan(self, plan: BucketPlan) -> None:
        """Switch to another plan for the same parameters, from the next step on."""
        kept = self.views.kept()
        self.exchange.prepare(plan)
        self.use(plan, *self._divided(plan))
        self.views.cut(plan, self.buffers, self.streams)
        self.views.restore(kept)

    def write_usage(
        self,
        absent: Iterable[int],
        sparse: Iterable[int],
        arrivals: Sequence[int] | None,
    ) -> None:
        """Write what ranks sum in addition to this rank's gradients."""
        outdated = self.views.has_misfits(self._matches_plan)
        write_usage(self.numbers, absent, sparse, arrivals, outdated)

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

    def _matches_plan(self, index: int) -> bool:
        spec: ParameterSpec = self.plan.specs[index]
        return _spec(*self.named[index], self._halves) == spec


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
    parameters: Sequence[torch.nn.Parameter],
    streams: Mapping[str, Streams],
) -> Mapping[str, Elements]:
    devices = {p.device.type: p.device for p in parameters}
    bucket_devices = _bucket_devices(parameters, channel.communicator.capabilities)
    memory = bucket_memory(channel, plan, name, bucket_devices)
    for kind, device in bucket_devices.items():
        if device == "cpu" and kind != "cpu":
            note_staging("gradients", str(devices[kind]))
            if kind == "cuda":
                page_lock(memory[kind], channel)
    for kind, elements in memory.items():
        if bucket_devices[kind].startswith("cuda"):
            # Another stream may still use memory that the allocator has just recycled.
            torch.cuda.synchronize(bucket_devices[kind])
        streams[kind].keep(elements)
        streams[kind].hand_over(elements)
    return memory


def _bucket_devices(
    parameters: Sequence[torch.nn.Parameter], capabilities: Capabilities
) -> dict[str, str]:
    """Return the device of the buckets, for each device type of the parameters.

    Host memory is used for a device that the engine does not support, and for several devices of
    one type, because a bucket is on one device.
    """
    return {
        kind: str(*found) if kind in capabilities.devices and len(found) == 1 else "cpu"
        for kind, found in _devices(parameters).items()
    }


def _streams_by_type(
    parameters: Sequence[torch.nn.Parameter], capabilities: Capabilities
) -> dict[str, Streams]:
    """Return the order of work between devices and buckets; for several of a type, the host's."""
    return {
        kind: streams_of(next(iter(found)), capabilities) if len(found) == 1 else HOST
        for kind, found in _devices(parameters).items()
    }


def _devices(parameters: Sequence[torch.nn.Parameter]) -> dict[str, set[torch.device]]:
    devices: dict[str, set[torch.device]] = {}
    for parameter in parameters:
        devices.setdefault(parameter.device.type, set()).add(parameter.device)
    return devices
