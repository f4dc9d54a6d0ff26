"""The steps of an optimizer whose work ranks share, where they can."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch

from hvdtrain.collective import collective
from hvdtrain.core.sharding.exchange import ScatteredSlices
from hvdtrain.errors import UnsupportedError
from hvdtrain.torch.averaged_gradients import Gradients
from hvdtrain.torch.buckets import ParameterBuckets
from hvdtrain.torch.exchanged import Exchanged
from hvdtrain.torch.operations.parts import parameters_of
from hvdtrain.torch.parameters import weakly
from hvdtrain.torch.sharding.node_update import NodeUpdate
from hvdtrain.torch.sharding.scattered_update import ScatteredUpdate
from hvdtrain.torch.sharding.update import OwnerUpdate

_logger = logging.getLogger("hvdtrain")


class TorchSharedSteps:
    """Steps of an optimizer on gradients of which each rank has the slices that it owns.

    Ranks that own whole parameters have all reduced gradients, which are the program's as usual.
    """

    @collective
    def __init__(self, optimizer: torch.optim.Optimizer, exchanged: Exchanged) -> None:
        self._optimizer, self._exchanged = optimizer, exchanged
        self._whole = exchanged.settings.shares_whole
        self._buckets: ParameterBuckets | None = None
        self._update: OwnerUpdate | None = None  # if ranks share the work
        self.kept = False
        self._scaled = False
        self.follow()
        if exchanged.gradients is not None and not self.active:
            _logger.info(
                "sharded=True: there is one rank, or gradients are reduced in host memory and "
                "their parameters are elsewhere: each rank takes the whole optimizer step"
            )

    @property
    def active(self) -> bool:
        """Whether the ranks share the work now."""
        return self._update is not None

    @property
    def gradients(self) -> Gradients:
        """The reduction of gradients, on a rank that takes part."""
        assert self._exchanged.gradients is not None
        return self._exchanged.gradients

    @collective
    def follow(self) -> None:
        """Use the present buckets of the gradients (collective if there are new ones)."""
        if self._exchanged.gradients is None:
            return
        # Ranks that share no memory bring the state together over the channel of the buckets.
        self.gradients.before_new_buckets = weakly(self.give_back)
        buckets = self.gradients.buckets
        if self._buckets is buckets:
            return
        self._count = len(parameters_of(self._optimizer))
        self.give_back()
        self._buckets, self._update = buckets, None
        slices = None if buckets.sharded is None else buckets.sharded.slices
        if isinstance(slices, ScatteredSlices):
            self._update = ScatteredUpdate(self._optimizer, buckets, slices)
        elif slices is not None:
            update = NodeUpdate(self._optimizer, buckets, slices)
            self._update = update if update.shared else None

    @collective
    def reduce(self) -> None:
        """Reduce all gradients, each to its owner."""
        count = len(parameters_of(self._optimizer))
        if self.active and count != self._count:
            raise RuntimeError(
                f"sharded=True: the optimizer had {self._count} parameters when its work was "
                f"shared, and has {count} now: wrap it again after changing param_groups"
            )
        if self.active and self.gradients.open and not self._whole:
            self.gradients.check_unchanged()
        self.gradients.reduce()
        self.kept, self._scaled = self._whole, False
        self.follow()
        if self._update is not None:
            self._update.begin()

    @collective
    def keep_gradients(self) -> None:
        """Give all ranks the reduced gradients, and leave them to the program."""
        if self._update is not None:
            self._update.settle()
        self.gradients.spread()
        self.kept = True

    @collective
    def step(self) -> None:
        assert self._update is not None
        if self._scaled and not self.kept:
            self.gradients.check_unchanged()
        hooks = getattr(self._optimizer, "_optimizer_step_pre_hooks", {})
        if hooks and not self.kept and any(self.gradients.used):
            raise UnsupportedError(
                "sharded=True: a step pre-hook of the optimizer would see gradients of this rank "
                "alone: call optimizer.synchronize() before step()"
            )
        for hook in hooks.values():
            hook(self._optimizer, (), {})
        if self.gradients.plan.buckets:
            self._update.step(self.kept)
            self._update.end_step(self.kept, whole=not self.gradients.plan_is_final)
            self.gradients.forget_results()
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # which schedulers read
        for hook in getattr(self._optimizer, "_optimizer_step_post_hooks", {}).values():
            hook(self._optimizer, (), {})

    def give_back(self) -> None:
        """Move the state to the user's optimizer until the next step (local with shared memory)."""
        if self._update is not None and not self._update.given:
            self._check_between_steps()
            self._update.give_back()

    def _check_between_steps(self) -> None:
        gradients = self._exchanged.gradients
        if gradients is not None and gradients.open:
            raise RuntimeError(
                "sharded=True: the optimizer's state was asked for between backward() and step(), "
                "when other ranks may be changing it: ask for it after step()"
            )

    @collective
    def consolidate(self, to: int) -> None:
        """Bring the whole state to one member, so that its state_dict() is local."""
        if self._update is not None and not self._update.readable:
            self._check_between_steps()
            self._update.consolidate(to)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state of the optimizer (local; collective without shared memory)."""
        update = self._update
        if update is None or update.given:
            return self._optimizer.state_dict()
        self._check_between_steps()
        if not update.give_consolidated():
            update.give_back()
        try:
            return self._optimizer.state_dict()
        finally:
            update.withdraw()

    def discard_state(self) -> None:
        """Take the state from the user's optimizer in the next step."""
        if self._update is not None:
            self._update.discard()

    @collective
    def clip(self, max_norm: float, kind: float, error_if_nonfinite: bool) -> torch.Tensor:
        """Scale the reduced gradients; see `DistributedOptimizer.clip_grad_norm_`."""
        update = self._update
        assert update is not None
        norm = update.norm(kind)
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(
                f"the norm of order {kind} of the gradients is {float(norm)}, so they cannot be "
                "clipped: leave out error_if_nonfinite to scale them all the same"
            )
        self.scale(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        wide = any(parameter.dtype is torch.float64 for parameter in self.gradients.parameters)
        return norm.to(torch.float64 if wide else torch.get_default_dtype())

    def scale(self, factor: torch.Tensor) -> None:
        """Multiply the reduced gradients by a factor, []."""
        assert self._update is not None
        if not factor.is_cpu or factor != 1.0:  # the host does not wait for a device
            self._update.scale(factor)
        self._scaled = True
        self.gradients.buckets.note()

    def check_whole(self) -> None:
        """Check that a loss scaler finds the gradients of all ranks."""
        if self._whole or not self.active:
            return
        if self.gradients.open or not self.gradients.whole:
            raise RuntimeError(
                "sharded=True: between backward() and step() gradients are those of this rank "
                "alone, and a GradScaler would decide on each rank for itself: call "
                "optimizer.synchronize() before scaler.unscale_(optimizer) or "
                "scaler.step(optimizer), and the latter within `with optimizer.skip_synchronize():`"
            )
