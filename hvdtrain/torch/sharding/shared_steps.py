"""The steps of an optimizer whose work the ranks of a node share, where they can."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import torch

from hvdtrain.buffer import Buffer
from hvdtrain.core.collectives.allreduce import Allreduce
from hvdtrain.core.sharding.exchange import ShardedExchange, shared_slices
from hvdtrain.errors import UnsupportedError
from hvdtrain.torch.gradients.exchanged import Exchanged
from hvdtrain.torch.gradients.gradients import Gradients
from hvdtrain.torch.sharding.segment_optimizer import check_elementwise
from hvdtrain.torch.sharding.update import SharedUpdate
from hvdtrain.types import ReduceOp

__all__ = ["SharedSteps"]

_logger = logging.getLogger("hvdtrain")


class SharedSteps:
    """Steps of an optimizer on gradients of which each rank has the slices that it owns.

    Args:
        optimizer: optimizer of the user.
        exchanged: its exchange, with the setting `sharded`.

    Attributes:
        kept: whether the program has asked for the gradients of all ranks, so that step() leaves
            them; otherwise step() removes them, because only their owners have the results.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, exchanged: Exchanged) -> None:
        check_elementwise(optimizer)
        self._optimizer, self._exchanged = optimizer, exchanged
        self._update: SharedUpdate | None = None
        self.kept = False
        self.follow()
        if exchanged.gradients is not None and not self.active:
            _logger.info(
                "sharded=True: the ranks of this node share no memory or are one: each takes the "
                "whole optimizer step"
            )

    @property
    def active(self) -> bool:
        """Whether the ranks share the work at present."""
        return self._update is not None and self._update.shared

    @property
    def gradients(self) -> Gradients:
        """The reduction of gradients, on a rank that takes part."""
        assert self._exchanged.gradients is not None
        return self._exchanged.gradients

    def follow(self) -> None:
        """Use the present buckets of the gradients (collective if there are new ones)."""
        if self._exchanged.gradients is None:
            return
        buckets = self.gradients.buckets
        if self._update is not None and self._update.buckets is buckets:
            return
        self.give_back()
        self._update = None
        slices = shared_slices(buckets.channel, buckets.memory)
        if isinstance(buckets.exchange, ShardedExchange) and slices is not None:
            self._update = SharedUpdate(self._optimizer, buckets, slices)

    def reduce(self) -> None:
        """Reduce all gradients, each to its owner (collective).

        Raises:
            RuntimeError: the program has changed a gradient that is not reduced.
        """
        if self.active and self.gradients.open:
            self.gradients.check_unchanged()
        self.gradients.finish()
        self.kept = False
        self.follow()

    def keep_gradients(self) -> None:
        """Give all ranks the reduced gradients, and leave them to the program (collective)."""
        if self._update is not None and self._update.shared:
            self._update.settle()
        self.gradients.spread()
        self.kept = True

    def step(self) -> None:
        """Take a step on the reduced gradients (collective)."""
        assert self._update is not None
        hooks = getattr(self._optimizer, "_optimizer_step_pre_hooks", {})
        if hooks and not self.kept:
            raise UnsupportedError(
                "sharded=True: a step pre-hook of the optimizer would see gradients of this rank "
                "alone: call optimizer.synchronize() before step()"
            )
        for hook in hooks.values():
            hook(self._optimizer, (), {})
        if self.gradients.plan.buckets:
            self._update.step(self.kept)
            self._update.exchange.whole = not self.gradients.plan_is_final
            if not self.kept:
                self._update.buckets.views.drop()
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # which schedulers read
        for hook in getattr(self._optimizer, "_optimizer_step_post_hooks", {}).values():
            hook(self._optimizer, (), {})

    def give_back(self) -> None:
        """Move the state into the user's optimizer, until the next step (local).

        Raises:
            RuntimeError: gradients of the next step have arrived, and other ranks may take it.
        """
        if self._update is not None and self._update.shared and not self._update.state.given:
            self._check_between_steps()
            self._update.state.give_back()

    def _check_between_steps(self) -> None:
        gradients = self._exchanged.gradients
        if gradients is not None and gradients.open:
            raise RuntimeError(
                "sharded=True: the optimizer's state was asked for between backward() and step(), "
                "when other ranks may be changing it: ask for it after step()"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state of the optimizer (local).

        Raises:
            RuntimeError: gradients of the next step have arrived, and other ranks may take it.
        """
        update = self._update
        if update is None or not update.shared or update.state.given:
            return self._optimizer.state_dict()
        self._check_between_steps()
        update.state.give_back()
        try:
            return self._optimizer.state_dict()
        finally:
            update.state.withdraw()

    def discard_state(self) -> None:
        """Take the state from the user's optimizer in the next step (local)."""
        if self._update is not None:
            self._update.state.discard()

    def norm(self, kind: float) -> float:
        """Return the norm of all reduced gradients together (collective).

        Args:
            kind: 2 for the Euclidean norm, inf for the largest absolute value, or another p.
        """
        update = self._update
        assert update is not None
        largest = math.isinf(kind)
        total = np.array([update.power_sum(kind)])
        op = ReduceOp.MAX if largest else ReduceOp.SUM
        name = f"norm of {update.buckets.reducer.name}"
        update.buckets.channel.run(Allreduce([Buffer.from_array(total)], [(1,)], op, name))
        # Every node has all slices, and has counted them.
        return float(total[0]) if largest else float(total[0] / update.nodes) ** (1.0 / kind)

    def scale(self, factor: float) -> None:
        """Multiply the reduced gradients that this rank owns (local)."""
        assert self._update is not None
        self._update.scale(factor)
