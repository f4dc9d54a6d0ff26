"""Batch normalization over the batches of all ranks, exact for unequal batches."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hvdtrain.core.gradient_settings import sample_weight_of
from hvdtrain.core.process_set import global_process_set
from hvdtrain.torch.operations.allreduce import allreduce_handle
from hvdtrain.torch.operations.gathers import allgather_handle
from hvdtrain.types import ReduceOp

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(_BatchNorm):
    """Normalize each channel by mean and variance over all ranks (collective in training).

    In eval() it is local: without running statistics it takes those of the rank's batch. The input
    has shape [batch, channels, ...] and any floating-point dtype, on the CPU or a GPU; batch sizes
    may differ between ranks, and a batch may be empty. While `counts` is False it takes part as if
    its batch were empty. Arguments and buffers are those of torch.nn.BatchNorm2d. For the mean loss
    over unequal batches, gradients are exact if the optimizer's sample_weight is set before
    backward(), or if each rank's loss is multiplied by its share of the samples.
    """

    counts = True

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected [batch, channels, ...], got {input.dim()} dimensions")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the normalized input, with the same shape and dtype."""
        self._check_input_dim(input)
        if not self.training:
            kept = (self.running_mean, self.running_var)
            return torch.nn.functional.batch_norm(
                input, *kept, self.weight, self.bias, kept[0] is None, eps=self.eps
            )
        arguments = (input, self.weight, self.bias, self.eps, self.counts)
        output, mean, variance, count = _Normalize.apply(*arguments)  # type: ignore[no-untyped-call]
        if self.track_running_stats:
            self._track(mean, variance, int(count))
        result: torch.Tensor = output
        return result

    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: int) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        weight = self.momentum
        if weight is None:  # the plain average of all batches so far
            weight = 1.0 / float(self.num_batches_tracked)
        unbiased = variance * (count / (count - 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), weight)


def count_batches(model: torch.nn.Module, counts: bool) -> None:
    """Set whether the layers of a model count this rank's next batches, which take part anyway."""
    for module in model.modules():
        if isinstance(module, SyncBatchNorm):
            module.counts = counts


class _Normalize(torch.autograd.Function):
    """y = weight (x - mean) / sqrt(var + eps) + bias, with mean and var over all ranks.

    Each rank sends its count n_r, mean_r and M2_r = sum (x - mean_r)^2 per channel; then
    mean = sum n_r mean_r / n and var = sum (M2_r + n_r (mean_r - mean)^2) / n (Chan et al.).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        counts: bool,
    ) -> tuple[torch.Tensor, ...]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean, variance, count = _statistics(wide, counts)
        inverse = torch.rsqrt(variance + eps)
        scale = inverse if weight is None else inverse * weight
        output = (wide - _broadcastable(mean, x)) * _broadcastable(scale, x)
        if bias is not None:
            output = output + _broadcastable(bias, x)
        ctx.save_for_backward(x, weight, mean, inverse)
        ctx.count, ctx.eps, ctx.bias_dtype = count, eps, None if bias is None else bias.dtype
        ctx.counts = counts
        ctx.weight_id = id(weight)
        total = torch.tensor(count, device="cpu")
        ctx.mark_non_differentiable(mean, variance, total)
        return output.to(x.dtype), mean, variance, total

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor, *_: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, inverse = ctx.saved_tensors
        wide = gradient.to(mean.dtype)
        told = sample_weight_of({ctx.weight_id})
        counts = 1.0 if told is None else told
        if told == 0 and ctx.counts and len(x) == 1:
            warnings.warn(
                "SyncBatchNorm counted a row of this rank, whose sample_weight is 0: if it is the "
                "filler of GlobalBatchSampler or StreamBatches, set counts = False of the layers "
                "before model(batch), and True before the next one",
                stacklevel=2,
            )
        if torch.is_grad_enabled():  # to be differentiated again: statistics depend on x, too
            counted = (x if ctx.counts else x[:0]).to(mean.dtype)
            mean = _mean_of_ranks(_sum(counted), ctx.count, counts, False)
            squares = _sum((counted - _broadcastable(mean, x)).square())
            inverse = torch.rsqrt(_mean_of_ranks(squares, ctx.count, counts, False) + ctx.eps)
        centred = x.to(mean.dtype) - _broadcastable(mean, x)
        own = torch.stack([_sum(wide), _sum(wide * centred)])
        plain, weighted = _mean_of_ranks(own, ctx.count, counts, True)
        scale = inverse if weight is None else inverse * weight
        slope = centred * _broadcastable(inverse.square() * weighted, x)
        dx = (wide - _broadcastable(plain, x) - slope) * _broadcastable(scale, x)
        # The gradients of the parameters stay local: the optimizer reduces them.
        dweight = None if weight is None else (own[1] * inverse).to(weight.dtype)
        dbias = None if ctx.bias_dtype is None else own[0].to(ctx.bias_dtype)
        if not ctx.counts:  # nothing of this input has reached another rank's loss
            dx = torch.zeros_like(dx)
        return dx.to(x.dtype), dweight, dbias, None, None


def _statistics(x: torch.Tensor, counts: bool) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return mean [channels], variance [channels] and count per channel over all ranks."""
    x = x if counts else x[:0]
    count = x.numel() // x.shape[1]
    mean = _sum(x) / max(count, 1)
    squares = _sum((x - _broadcastable(mean, x)).square())
    # The counts are sent again from the host: reading them from a GPU would wait for its work.
    own = torch.cat([mean.new_full((1,), count), mean, squares]).double()
    number = torch.tensor([count], device="cpu")
    every, numbers = allgather_handle([own[None], number]).run()
    counts = every[:, :1]
    means, squares = every[:, 1:].chunk(2, dim=1)
    total = int(numbers.sum())
    if total < 2:
        raise ValueError(f"expected more than 1 value per channel over all ranks, got {total}")
    overall = (counts * means).sum(0) / total
    variance = (squares + counts * (means - overall).square()).sum(0) / total
    return overall.to(x.dtype), variance.to(x.dtype), total


class _SumOfRanks(torch.autograd.Function):
    """The sum over ranks of values, or of gradients, of which each rank's later counts c_r times.

    In the gradient by an input of rank r, what another rank's loss adds counts c_s / c_r times.
    """

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, counts: float, gradients: bool) -> torch.Tensor:
        ctx.counts, ctx.gradients = counts, gradients
        sent = own * counts if gradients else own
        arguments = (ReduceOp.SUM, None, 1.0, 1.0, global_process_set)
        total: torch.Tensor
        (total,) = allreduce_handle([sent], *arguments).run()
        if not gradients:
            return total
        return total / counts if counts else torch.zeros_like(total)  # of what will not count

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _sum_of_ranks(upstream, ctx.counts, not ctx.gradients), None, None


def _sum_of_ranks(own: torch.Tensor, counts: float, gradients: bool) -> torch.Tensor:
    total: torch.Tensor
    total = _SumOfRanks.apply(own, counts, gradients)  # type: ignore[no-untyped-call]
    return total


def _mean_of_ranks(sums: torch.Tensor, count: int, counts: float, gradients: bool) -> torch.Tensor:
    """Return the sums of all ranks divided by the count of all, differentiably."""
    return (_sum_of_ranks(sums.double(), counts, gradients) / count).to(sums.dtype)


def _sum(x: torch.Tensor) -> torch.Tensor:
    return x.sum(dim=[d for d in range(x.dim()) if d != 1])


def _broadcastable(channels: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return channels.reshape(1, -1, *[1] * (x.dim() - 2))
