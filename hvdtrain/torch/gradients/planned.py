"""A bucket plan for PyTorch parameters, and what reduces by it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hvdtrain.buffer import Elements
from hvdtrain.core import context
from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.bucket_plans import agree_on_plan, open_plan_channel
from hvdtrain.core.gradients.communicators import Communicators, open_communicators
from hvdtrain.core.gradients.exchange import Exchange
from hvdtrain.core.gradients.memory import bucket_memory, cut
from hvdtrain.core.gradients.plan import BucketPlan, ParameterSpec
from hvdtrain.core.gradients.reducer import Reducer
from hvdtrain.core.staging import note_staging
from hvdtrain.streams import Streams
from hvdtrain.torch.gradients.numbers import count_of, note
from hvdtrain.torch.gradients.places import places_of, staged_in, streams_by_type
from hvdtrain.torch.gradients.settings import GradientSettings
from hvdtrain.torch.gradients.specs import spec_of
from hvdtrain.torch.gradients.views import BucketViews
from hvdtrain.torch.tensors.pinned import pin

__all__ = ["Planned", "type_change"]

Named = Sequence[tuple[str, torch.nn.Parameter]]


@dataclass
class Planned:
    """A plan that all ranks have agreed on, for parameters as they were then.

    Attributes:
        named: name and parameter, in the order of the plan.
        channel: of the plan's own.
        exchange: what is done with a bucket.
        memory: for each device of the plan that of its buckets.
        streams: for each device of the plan the order of work on it.
        halves: gradients of half types are reduced as they are.
        reducer: reduces the buckets.
        views: the gradients in them.
        types: of the parameters.
    """

    named: Named
    channel: Channel
    exchange: Exchange
    memory: Mapping[str, Elements]
    streams: Mapping[str, Streams]
    halves: bool
    reducer: Reducer
    views: BucketViews
    types: list[torch.dtype]

    @classmethod
    def agree(cls, named: Named, settings: GradientSettings) -> Planned:
        """Make a plan (collective).

        Raises:
            MismatchError: the ranks have different parameters.
        """
        parent, exchange = settings.process_set.channel(), settings.make_exchange()
        capabilities = parent.communicator.capabilities
        halves = capabilities.halves and exchange.half_types
        plan = agree_on_plan([spec_of(*pair, halves) for pair in named], parent, settings.groups)
        exchange.prepare(plan)
        channel = open_plan_channel(parent)
        name = f"plan {context.current().next_number(channel)}"
        parameters = [parameter for _, parameter in named]
        devices = {p.device.type: p.device for p in parameters}
        places = places_of(parameters, capabilities)
        memory = bucket_memory(channel, plan, name, places)
        for kind in staged_in(places):
            note_staging("gradients", str(devices[kind]))
            if kind == "cuda":
                pin(memory[kind], channel)
        streams = streams_by_type(parameters, capabilities)
        for kind, elements in memory.items():  # which may be given back while they use it
            if places[kind].startswith("cuda"):
                torch.cuda.synchronize(places[kind])  # it may have been another stream's
            streams[kind].keep(elements)
            streams[kind].hand_over(elements)
        reducer = Reducer(
            context.current(),
            channel,
            plan,
            cut(plan.buckets, memory),
            exchange,
            name,
            numbers=count_of(len(parameters)),
            streams=[streams[bucket.device] for bucket in plan.buckets],
            counted=True,
            communicators=_communicators(channel, exchange, name),
        )
        views = BucketViews(parameters, reducer, settings.compression)
        types = [parameter.dtype for parameter in parameters]
        return cls(named, channel, exchange, memory, streams, halves, reducer, views, types)

    def refuse_capture(self) -> None:
        """Refuse to be part of a graph that a device of the parameters records.

        Raises:
            UnsupportedError: it does.
        """
        for streams in self.streams.values():
            streams.refuse_capture("an optimizer step")

    @property
    def plan(self) -> BucketPlan:
        """How gradients are cut into buckets."""
        return self.reducer.plan

    def use_plan(self, plan: BucketPlan) -> None:
        """Reduce by another plan for the same parameters, from the next step on."""
        kept = self.views.kept()
        self.exchange.prepare(plan)
        streams = [self.streams[bucket.device] for bucket in plan.buckets]
        self.reducer.use(plan, cut(plan.buckets, self.memory), streams)
        self.views.cut()
        self.views.restore(kept)

    def note_numbers(
        self,
        absent: Iterable[int],
        sparse: Iterable[int],
        arrivals: Sequence[int] | None,
    ) -> None:
        """Write what ranks add up beside this rank's gradients: see `numbers.note`."""
        outgrown = self.views.has_misfits(self._fits)
        note(self.reducer.numbers, absent, sparse, arrivals, outgrown)

    def _fits(self, index: int) -> bool:
        spec: ParameterSpec = self.plan.specs[index]
        return spec_of(*self.named[index], self.halves) == spec


def type_change(named: Named, types: Sequence[torch.dtype]) -> str:
    """Describe the first parameter whose type is not the one of `types`; "" where all are."""
    if [parameter.dtype for _, parameter in named] == types:
        return ""
    return next(
        f"{name!r} from {kept} to {parameter.dtype}"
        for (name, parameter), kept in zip(named, types, strict=True)
        if parameter.dtype != kept
    )


def _communicators(channel: Channel, exchange: Exchange, name: str) -> Communicators:
    """Return the communicators of an exchange (collective if it is hierarchical)."""
    if not exchange.hierarchical:
        return Communicators.flat(channel.communicator)
    node = context.current().topology.node
    return open_communicators(channel, exchange.spec, node, name)
