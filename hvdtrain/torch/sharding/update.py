"""The optimizer's step, shared by the ranks of a node."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from hvdtrain.core.gradients.plan import BucketPlan
from hvdtrain.core.sharding.exchange import ShardedExchange
from hvdtrain.core.sharding.operations import PutSegments
from hvdtrain.engines.slices import Slices
from hvdtrain.torch.gradients.buckets import ParameterBuckets
from hvdtrain.torch.gradients.slices import sum_slices
from hvdtrain.torch.sharding.fused_steps import FusedSteps
from hvdtrain.torch.sharding.fused_update import FusedUpdate
from hvdtrain.torch.sharding.owned import OwnedSegments
from hvdtrain.torch.sharding.shared_state import SharedState
from hvdtrain.torch.sharding.weight_memory import WeightMemory

__all__ = ["SharedUpdate"]


class SharedUpdate:
    """Takes the optimizer's step on the segments that this rank owns, for all ranks of the node.

    Where the compiled kernel has the bits of torch's fused optimizer, gradients are left in their
    buckets until the step, which sums them in the same pass.

    Args:
        optimizer: optimizer of the user.
        buckets: buckets of its parameters, with a ShardedExchange.
        slices: slices of the buckets.

    Attributes:
        buckets: buckets of the parameters.
        state: state of the optimizer.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, buckets: ParameterBuckets, slices: Slices
    ) -> None:
        self._optimizer, self.buckets, self._slices = optimizer, buckets, slices
        parameters = [parameter for _, parameter in buckets.named]
        specs, name = buckets.plan.specs, buckets.reducer.name
        self._weights = WeightMemory(parameters, specs, slices, buckets.channel, name)
        self._fused_steps = FusedSteps(type(optimizer), buckets, slices)
        self.state = SharedState(optimizer, buckets, slices)
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

    def step(self, kept: bool) -> None:
        """Update the weights of all ranks with the gradients of the owners (collective).

        Args:
            kept: whether all ranks have the reduced gradients, so that the program may have
                replaced some.
        """
        fused = self._prepare()
        assert self.state.memory is not None
        if fused is None:
            self.settle()
        pairs = self._owned.step(self.state.memory, fused.parameters if fused else (), kept)
        write: Callable[[], object] = partial(fused.update, self._factor, kept) if fused else bool
        name = f"weights of {self.buckets.reducer.name}"
        self.buckets.channel.run(PutSegments(pairs, write, name))
        self.exchange.pending.clear()
        self._factor = 1.0
        defers = fused is not None and self.nodes == 1
        self.exchange.defer_to(self._fused_steps.boards[self._slices.number] if defers else None)

    def _prepare(self) -> FusedUpdate | None:
        """Follow a new plan, new settings of the optimizer, and what the program has given it.

        Returns:
            The update that sums and steps in one pass; None if the settings do not allow it.
        """
        if self._plan is not self.buckets.plan:
            self.state.give_back()
            self._plan, self.state.memory = self.buckets.plan, None
            self._owned = OwnedSegments(self._optimizer, self.buckets, self._slices, self._weights)
            self._fused = self._fused_steps.update_of(self._owned, self._weights)
        settings = _settings_that_matter(self._optimizer)
        if self.state.memory is None or settings != self._settings:
            self._settings = settings
            # Others change the state only when all ranks have read it, and are here to allocate.
            self.state.give_back()
            self.state.allocate(self._owned)
        assert self.state.memory is not None
        if self.state.given:
            self.state.take(self._owned)
        self._owned.follow()
        return self._fused if self._fused and self._fused.prepare(self.state.memory) else None

    def settle(self) -> None:
        """Sum this rank's slices and scale them, if that was left to the step (collective)."""
        sum_slices(self.buckets)
        factor, self._factor = self._factor, 1.0
        if factor != 1.0 and (own := self.gradients()):
            torch._foreach_mul_(own, factor)

    def gradients(self) -> list[torch.Tensor]:
        """Return the reduced gradients that this rank owns (collective after a new plan)."""
        self._prepare()
        return self._owned.gradients()

    def power_sum(self, kind: float) -> float:
        """Sum this rank's slices; return the sum of powers of their elements (collective).

        Args:
            kind: power; with inf the result is the largest absolute value.
        """
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

    def scale(self, factor: float) -> None:
        """Multiply the reduced gradients that this rank owns, at the latest in the step (local)."""
        self._factor *= factor


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
