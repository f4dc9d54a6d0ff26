"""One optimizer step with torch: clipping, skipping, averaged weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hvdtrain.torch as hvd
from hvdtrain.collective import collective
from hvdtrain.torch.functions import broadcast_module
from hvdtrain.train.torch.forward import Precision

# Below this scale, gradients that overflow would overflow without scaling as well.
_SMALLEST_SCALE = 1.0


@dataclass(frozen=True)
class StepResult:
    """The result of a step, the same on every rank, unless ranks exchange weights."""

    norm: float
    skipped: bool = False
    fault: bool = False


class Updater:
    """Takes the optimizer steps of one model.

        updater.begin([len(batch) for batch in microbatches])
        for batch in microbatches:
            with updater.precision.autocast():
                loss = ...                           # the mean over the microbatch
            updater.backward(loss, len(batch))
        update = updater.step()

    The gradient is that of the mean loss over the samples of all microbatches and ranks, whatever
    the number and the sizes of each rank's microbatches, unless the optimizer's exchange counts all
    ranks alike. For gradients computed otherwise, such as by hvd.backward_by_shards(), of losses
    from precision.scaled(), call optimizer.zero_grad() instead of begin(), and no backward().

    If the optimizer exchanges weights, the gradient is that of the rank's own mean loss, and so is
    its norm. A rank whose gradient is not finite leaves out its update, and takes part in the
    exchange.
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
        optimizer.loss_scaler = precision.scaler
        self.averaged: AveragedModel | None = None
        if ema is not None:
            average = get_ema_multi_avg_fn(ema)
            self.averaged = AveragedModel(model, multi_avg_fn=average)
        self._samples = 0

    def begin(self, sizes: Sequence[int]) -> None:
        """Begin a step."""
        self._optimizer.zero_grad()
        self._samples = sum(sizes)
        exchange = self._optimizer.exchange
        if exchange is None or exchange.takes_samples:
            self._optimizer.sample_weight = self._samples
        passes = max(1, sum(1 for samples in sizes if samples))
        if self._optimizer.backward_passes_per_step != passes:
            self._optimizer.set_backward_passes_per_step(passes)

    @collective
    def backward(self, loss: torch.Tensor, samples: int) -> None:
        """Add the gradient of one microbatch; the last one starts the reduction."""
        weighted = loss if samples == self._samples else loss * (samples / self._samples)
        self.precision.scaled(weighted).backward()

    @collective
    def step(self) -> StepResult:
        """Reduce what is left, then step unless the gradient is not finite."""
        if self._optimizer.exchanges_weights:
            return self._local_step()
        scaler = self.precision.scaler
        if self._optimizer.sharded and scaler is None:
            return self._shared_step()
        self._optimizer.synchronize()
        if scaler is not None:
            scaler.unscale_(self._optimizer)
        gradients = self._gradients()
        norm = total_norm(gradients).item()
        finite = math.isfinite(norm)
        if finite:
            if self._clip_norm is not None:
                clip_gradients(gradients, norm, self._clip_norm)
            with self._optimizer.skip_synchronize():
                if scaler is None:
                    self._optimizer.step()
                else:
                    scaler.step(self._optimizer)
            if self.averaged is not None:
                self.averaged.update_parameters(self._model)
        if scaler is not None:
            scaler.update()
        update = StepResult(norm) if finite else StepResult(norm, True, self._is_real_overflow())
        self.precision.losses.clear()
        return update

    @collective
    def _shared_step(self) -> StepResult:
        """Step on gradients of which this rank has the slices that it owns."""
        norm, largest = self._optimizer.clip_grad_norm_(math.inf).item(), self._clip_norm
        finite = math.isfinite(norm)
        if finite:
            if largest is not None and norm > largest:
                self._optimizer.scale_gradients(largest / norm)
            self._optimizer.step()
            if self.averaged is not None:
                self.averaged.update_parameters(self._model)
        self.precision.losses.clear()
        return StepResult(norm, skipped=not finite, fault=not finite)

    def _local_step(self) -> StepResult:
        """Step on the gradient of this rank, and exchange weights if that is due."""
        gradients = self._gradients()
        norm = total_norm(gradients).item()
        finite = math.isfinite(norm)
        if not finite:
            self._optimizer.zero_grad()  # then the step leaves the weights as they are
        elif self._clip_norm is not None:
            clip_gradients(gradients, norm, self._clip_norm)
        self._optimizer.step()
        return StepResult(norm, skipped=not finite)

    @collective
    def broadcast(self) -> None:
        """Copy the loss scale and the averaged weights of rank 0 to every rank."""
        scaler = self.precision.scaler
        if scaler is not None:
            scaler.load_state_dict(hvd.broadcast_object(scaler.state_dict(), name="loss scale"))
        if self.averaged is not None:
            broadcast_module(self.averaged)

    def _gradients(self) -> list[torch.Tensor]:
        groups = self._optimizer.param_groups
        return [p.grad for group in groups for p in group["params"] if p.grad is not None]

    @collective
    def _is_real_overflow(self) -> bool:
        """Return whether a smaller loss scale would not have helped."""
        scaler = self.precision.scaler
        if scaler is None or scaler.get_scale() < _SMALLEST_SCALE:
            return True
        finite = all(bool(loss.isfinite().all()) for loss in self.precision.losses)
        return not all(hvd.allgather_object(finite, name="finite losses"))


def total_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of all gradients together, float32 or float64 [].

    It is finite only if every element is, and 0 without gradients.
    """
    if not gradients:
        return torch.tensor(0.0)
    types = {gradient.dtype for gradient in gradients}
    if types <= {torch.float32, torch.float64}:
        norms = torch._foreach_norm(gradients)
    else:  # the norm of float16 would be float16, whose largest number is 65504
        wide = torch.float64 if torch.float64 in types else torch.float32
        norms = torch._foreach_norm(gradients, 2, dtype=wide)
    if len({(norm.device, norm.dtype) for norm in norms}) > 1:
        norms = tuple(norm.to(norms[0].device, torch.float64) for norm in norms)
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def clip_gradients(gradients: list[torch.Tensor], norm: float, largest: float) -> None:
    """Scale gradients in place so that their norm does not exceed a maximum."""
    if norm > largest:
        torch._foreach_mul_(gradients, largest / norm)
