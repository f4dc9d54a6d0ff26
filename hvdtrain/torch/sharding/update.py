"""The optimizer's step, shared by the ranks of a node."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core.collectives.allreduce import Allreduce
from hvdtrain.core.collectives.memory import AllocateMemory
from hvdtrain.core.gradients.plan import BucketPlan
from hvdtrain.core.sharding.exchange import PutSegments, ShardedExchange
from hvdtrain.core.sharding.segments import Quantity, Segment, segments_of
from hvdtrain.engines.features import Slices
from hvdtrain.torch.gradients.buckets import ParameterBuckets, sum_slices
from hvdtrain.torch.sharding.fused_update import FusedSteps, FusedUpdate
from hvdtrain.torch.sharding.segment_optimizer import SegmentSteps, quantities_of
from hvdtrain.torch.sharding.state_memory import TorchStateMemory, UserState, WeightMemory
from hvdtrain.torch.tensors.parts import parameters_of
from hvdtrain.types import ReduceOp


class SharedState(UserState):
    """State that is either in memory which all ranks of the node can read, or with the user."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, buckets: ParameterBuckets, slices: Slices
    ) -> None:
        super().__init__(optimizer, [parameter for _, parameter in buckets.named])
        self.buckets, self._slices = buckets, slices
        self._index = {id(p): index for index, p in enumerate(self._parameters)}
        self.memory: TorchStateMemory | None = None

    @collective
    def allocate(self, segments: Sequence[Sequence[Segment]]) -> None:
        """Allocate memory for what the optimizer keeps."""
        quantities = self._quantities()
        self.memory = TorchStateMemory(self.buckets.plan.specs, segments, quantities)
        name = f"of the optimizer of {self.buckets.reducer.name}"
        memory = self.buckets.channel.run(AllocateMemory(self.memory.nbytes, name))
        copies = self._slices.copies(memory)
        if copies is None:
            raise RuntimeError(
                f"sharded=True: {self.memory.nbytes >> 10:,} KiB for the optimizer's state cannot "
                "be shared on this node: free memory, or use sharded=False "
                "(in train --no-shard-optimizer)"
            )
        self.memory.use(copies, self._slices.number)

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

    def take(self, steps: SegmentSteps) -> None:
        """Move the state from the user's optimizer into the memory."""
        assert self.memory is not None
        self.memory.clear()
        parts = {}
        for index, segment in steps.owned.items():
            entry = self._optimizer.state.get(self._parameters[index])
            if entry is not None:
                parts[index] = self.memory.cut(segment, entry)
                self.memory.keep(index, parts[index])
        steps.use_state(parts)
        self.withdraw()

    def give_back(self) -> None:
        """Move the whole state into the user's optimizer, until the next step."""
        if self.memory is None or self.given:
            return
        self._given = True
        for parameter in parameters_of(self._optimizer):
            index = self._index.get(id(parameter))
            entry = None if index is None else self.memory.read(index)
            if entry:
                self._optimizer.state[parameter] = entry


class TorchSharedUpdate(SharedState):
    """Takes the optimizer's step on the segments that this rank owns, for all ranks of the node.

    Where the compiled kernel has the bits of torch's fused optimizer, gradients are left in their
    buckets until the step, which sums them in the same pass.
    """

    @collective
    def __init__(
        self, optimizer: torch.optim.Optimizer, buckets: ParameterBuckets, slices: Slices
    ) -> None:
        super().__init__(optimizer, buckets, slices)
        specs, name = buckets.plan.specs, buckets.reducer.name
        self._weights = WeightMemory(self._parameters, specs, slices, buckets.channel, name)
        self._fused_steps = FusedSteps(type(optimizer), buckets, slices)
        self._plan: BucketPlan | None = None
        self._settings: object = None
        self._fused: FusedUpdate | None = None
        self._factor = 1.0  # of the reduced gradients, by which they are not multiplied yet

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

    @collective
    def step(self, kept: bool) -> None:
        fused = self._prepare()
        if fused is None or (self._factor != 1.0 and not fused.takes_all):
            self.settle()  # what the kernel does not take is scaled, too
        pairs = self._step_on_segments(fused.parameters if fused else (), kept)
        write = partial(fused.update, self._factor, kept) if fused else None
        name = f"weights of {self.buckets.reducer.name}"
        self.buckets.channel.run(PutSegments(pairs, write, name))
        self.exchange.pending.clear()
        self._factor = 1.0
        defers = fused is not None and self.nodes == 1
        self.exchange.defer_to(self._fused_steps.boards[self._slices.number] if defers else None)

    def _step_on_segments(self, left: Collection[int], kept: bool) -> list[tuple[Buffer, Buffer]]:
        """Step with torch; return weights that have changed, and their places on other ranks."""
        assert self.memory is not None
        self._steps.step(left, kept)
        used = [index for index in self._steps.used if index not in left]
        for index in used:
            self.memory.keep(index, self._steps.entry(index))
        return [pair for index in used for pair in self._weights.places(self._steps.owned[index])]

    @collective
    def _prepare(self) -> FusedUpdate | None:
        """Follow a new plan, new settings of the optimizer, and what the program has given it."""
        if self._plan is not self.buckets.plan:
            self.give_back()
            self._plan, self.memory = self.buckets.plan, None
            self._cut(self._plan)
        settings = _settings_that_matter(self._optimizer)
        if self.memory is None or settings != self._settings:
            self._settings = settings
            # Change the state only when all ranks have read it and have come here to allocate.
            self.give_back()
            self.allocate(self._segments)
        assert self.memory is not None
        if self.given:
            self.take(self._steps)
        self._weights.follow()
        return self._fused if self._fused and self._fused.prepare(self.memory) else None

    def _cut(self, plan: BucketPlan) -> None:
        slices = self._slices
        self._segments = segments_of(plan, slices.owners)
        found = self._segments[slices.number] if slices.number < slices.owners else []
        owned = {segment.parameter: segment for segment in found}
        tensors = {index: self._weights.segment(segment) for index, segment in owned.items()}
        self._steps = SegmentSteps(self._optimizer, self.buckets, owned, tensors)
        self._fused = self._fused_steps.update_of(self._steps, self._weights)

    @collective
    def settle(self) -> None:
        """Sum this rank's slices and scale them, if that was left to the step."""
        if not self.shared:
            return
        sum_slices(self.buckets)
        factor, self._factor = self._factor, 1.0
        if factor != 1.0 and (own := self.gradients()):
            torch._foreach_mul_(own, factor)

    @collective
    def gradients(self) -> list[torch.Tensor]:
        """Return the reduced gradients that this rank owns (collective after a new plan)."""
        self._prepare()
        return self._steps.gradients()

    @collective
    def norm(self, kind: float) -> torch.Tensor:
        largest = math.isinf(kind)
        total = np.array([self._power_sum(kind)])
        op = ReduceOp.MAX if largest else ReduceOp.SUM
        name = f"norm of {self.buckets.reducer.name}"
        self.buckets.channel.run(Allreduce([Buffer.from_array(total)], [(1,)], op, name))
        # Every node has all slices, and has counted them.
        norm = float(total[0]) if largest else float(total[0] / self.nodes) ** (1.0 / kind)
        return torch.tensor(norm, dtype=torch.float64, device="cpu")

    @collective
    def _power_sum(self, kind: float) -> float:
        """Sum this rank's slices; return the sum of powers of their elements, or the largest."""
        fused = self._prepare()
        if kind == 2.0 and self._factor == 1.0 and fused and fused.takes_all:
            total = fused.sum()
            self.exchange.pending.clear()
            return total
        self.settle()
        own = self.gradients()
        if not own:
            return 0.0
        norms = torch.stack([norm.double() for norm in torch._foreach_norm(own, kind)])
        return float(norms.max() if math.isinf(kind) else norms.pow(kind).sum())

    def begin(self) -> None:
        """Begin with other reduced gradients."""
        self._factor = 1.0

    def scale(self, factor: torch.Tensor) -> None:
        """Multiply the reduced gradients that this rank owns, at the latest in the step."""
        self._factor *= float(factor)


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
