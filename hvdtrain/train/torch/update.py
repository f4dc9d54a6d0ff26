"""One optimizer step with torch: parts, mixed precision, clipping, skipping, averaged weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hvdtrain.torch as hvd
from hvdtrain.train.torch.norm import clip, total_norm
from hvdtrain.train.torch.precision import Precision

__all__ = ["Update", "Updater"]

# Below, gradients that overflow do so without a factor as well.
_SMALLEST_SCALE = 1.0


@dataclass(frozen=True)
class Update:
    """What became of a step; the same on every rank.

    Attributes:
        norm: of the reduced gradient before it is clipped; inf or nan where it is not finite.
        skipped: the weights are as before, since the gradient was not finite.
        fault: it was not because the loss was scaled too much, which fp16 does now and then.
    """

    norm: float
    skipped: bool = False
    fault: bool = False


class Updater:
    """Takes the steps of one model.

        updater.begin([len(part) for part in parts])
        for part in parts:
            with updater.precision.autocast():
                loss = ...                           # the mean over the part
            updater.backward(loss, len(part))
        update = updater.step()

    The gradient is that of the mean loss over the samples of all parts and ranks, however many
    parts, of however many samples, each rank has. Gradients that were computed by other means,
    such as hvd.backward_by_shards(), of losses that went through precision.scaled(), take
    optimizer.zero_grad() for begin(), and no backward().

    Args:
        model: whose parameters the optimizer has, as it was before torch.compile().
        optimizer: with op=Average, or with any op where gradients come from elsewhere.
        precision: the types of operations.
        clip_norm: the largest norm of the reduced gradient; None: any.
        ema: the decay of an exponential moving average of the weights; None: there is none.

    Attributes:
        averaged: the model with averaged weights and the newest buffers, where there is one.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: hvd.DistributedOptimizer,
        precision: Precision,
        clip_norm: float | None = None,
        ema: float | None = None,
    ) -> None:
        self._model, self._optimizer, self.precision = model, optimizer, precision
        self._clip_norm = clip_norm
        self.averaged: AveragedModel | None = None
        if ema is not None:
            self.averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(ema))
        self._samples = 0

    def begin(self, parts: Sequence[int]) -> None:
        """Begin a step (local).

        Args:
            parts: how many samples each of this rank's parts has; backward() is called for those
                that have any, of which there may be none.
        """
        self._optimizer.zero_grad()
        self._samples = sum(parts)
        self._optimizer.sample_weight = self._samples
        passes = max(1, sum(1 for samples in parts if samples))
        if self._optimizer.backward_passes_per_step != passes:
            self._optimizer.set_backward_passes_per_step(passes)

    def backward(self, loss: torch.Tensor, samples: int) -> None:
        """Add the gradient of one part; the last one's is reduced on the way (collective).

        Args:
            loss: the mean over the part, [].
            samples: how many the part has, at least 1.
        """
        weighted = loss if samples == self._samples else loss * (samples / self._samples)
        self.precision.scaled(weighted).backward()

    def step(self) -> Update:
        """Reduce what is left, then step, unless the gradient is not finite (collective)."""
        scaler = self.precision.scaler
        self._optimizer.synchronize()
        if scaler is not None:
            scaler.unscale_(self._optimizer)
        gradients = self._gradients()
        norm = total_norm(gradients).item()
        finite = math.isfinite(norm)
        if finite:
            if self._clip_norm is not None:
                clip(gradients, norm, self._clip_norm)
            with self._optimizer.skip_synchronize():
                if scaler is None:
                    self._optimizer.step()
                else:
                    scaler.step(self._optimizer)
            if self.averaged is not None:
                self.averaged.update_parameters(self._model)
        if scaler is not None:
            scaler.update()
        update = Update(norm) if finite else Update(norm, True, self._is_fault())
        self.precision.losses.clear()
        return update

    def broadcast(self) -> None:
        """Give every rank what rank 0 has beside weights and optimizer (collective)."""
        scaler = self.precision.scaler
        if scaler is not None:
            scaler.load_state_dict(hvd.broadcast_object(scaler.state_dict(), name="loss scale"))
        if self.averaged is not None:
            hvd.broadcast_parameters(self.averaged.state_dict(), root_rank=0)

    def _gradients(self) -> list[torch.Tensor]:
        groups = self._optimizer.param_groups
        return [p.grad for group in groups for p in group["params"] if p.grad is not None]

    def _is_fault(self) -> bool:
        """Return whether a smaller scale would not have helped (collective)."""
        scaler = self.precision.scaler
        if scaler is None or scaler.get_scale() < _SMALLEST_SCALE:
            return True
        finite = all(bool(loss.isfinite().all()) for loss in self.precision.losses)
        return not all(hvd.allgather_object(finite, name="finite losses"))
