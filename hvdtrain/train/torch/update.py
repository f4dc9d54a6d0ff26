"""The optimizer of a run with torch, and one step of it: clipping, skipping, averaged weights."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hvdtrain.torch as hvd
from hvdtrain.collective import collective
from hvdtrain.core import context
from hvdtrain.core.objects import allgather_object
from hvdtrain.errors import NotFiniteError, UsageError
from hvdtrain.topology import format_ranks
from hvdtrain.torch.functions import broadcast_module
from hvdtrain.torch.sharding.node_update import shares_exactly
from hvdtrain.train.config_file import counted
from hvdtrain.train.optimizers.layerwise import Lamb, Lars
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.recipe import Recipe


def plain_optimizer(
    recipe: Recipe, model: torch.nn.Module, options: TrainOptions
) -> torch.optim.Optimizer:
    """Return the optimizer of a recipe or of the options.

    As in torch, sgd and adam add the weight decay to the gradient of every parameter, and adamw
    subtracts it from every parameter; lars and lamb decay layers only.
    """
    parameters, lr = list(model.parameters()), options.base_lr
    if recipe.optimizer is not None:
        own: torch.optim.Optimizer = recipe.optimizer(model.parameters(), lr)
        return own
    decay, momentum = options.used_weight_decay, options.momentum
    # Fused steps read and write each value once: on a CPU Adam takes a fifth of the time. With
    # half types torch 2.13 computes wrong numbers there.
    fused = all(
        parameter.is_floating_point() and not (parameter.is_cpu and parameter.itemsize == 2)
        for parameter in parameters
    )
    match options.optimizer:
        case "adam":
            return torch.optim.Adam(parameters, lr=lr, weight_decay=decay, fused=fused)
        case "adamw":
            return torch.optim.AdamW(parameters, lr=lr, weight_decay=decay, fused=fused)
        case "lars":
            return Lars(parameters, lr=lr, momentum=momentum, weight_decay=decay)
        case "lamb":
            return Lamb(parameters, lr=lr, weight_decay=decay)
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=decay, fused=fused)


def _require_dense_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse what the first step would, or the first checkpoint."""
    fails = [g["params"] for g in optimizer.param_groups if g.get("fused") or g.get("momentum")]
    of_those = {id(parameter) for parameters in fails for parameter in parameters}
    for name, module in model.named_modules():
        own = {id(p) for p in module.parameters(recurse=False) if p.requires_grad}
        if getattr(module, "sparse", False) is True and own & of_those:
            raise UsageError(
                f"gradients of layer {name!r} are sparse: fused optimizers do not take them, and a "
                "checkpoint holds no sparse momenta: give the recipe an optimizer such as "
                "SparseAdam or SGD(parameters, lr), or the layer sparse=False"
            )


@collective
def distributed_optimizer(
    recipe: Recipe, model: torch.nn.Module, options: TrainOptions
) -> hvd.DistributedOptimizer:
    """Return the optimizer of a recipe or of the options, distributed."""
    own = plain_optimizer(recipe, model, options)
    op = hvd.Average if options.virtual_shards is None else hvd.Sum
    exchange, sharded = options.make_exchange(), options.shard_optimizer
    if sharded is None:
        # Where ranks can be lost, steps would be taken again. The squares of a norm are summed in
        # another order, and fp16 needs whole gradients.
        sharded = (
            context.current().failures is None
            and (exchange, options.virtual_shards, options.clip_norm) == (None, None, None)
            and options.amp != "fp16"
            and shares_exactly(own, "sharing the optimizer's work")
        )
    if not sharded:  # which makes gradients dense
        _require_dense_state(model, own)
    try:
        return hvd.DistributedOptimizer(
            own,
            model.named_parameters(),
            op=op,
            exchange=exchange,
            sharded=sharded,
        )
    except ValueError as error:
        if options.shard_optimizer:
            raise UsageError(f"--shard-optimizer: {error}") from error
        if exchange is None:
            raise
        raise UsageError(f"--exchange {options.exchange}: {error}") from error


_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """Mixed precision of operations; weights, gradients and optimizer state keep their types."""

    def __init__(self, amp: str, device: torch.device) -> None:
        self._device, self._type = device.type, _TYPES.get(amp)
        self.scaler = torch.amp.GradScaler(device.type) if amp == "fp16" else None
        self.losses: list[torch.Tensor] = []

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context for a forward pass and its loss, but not for backward."""
        if self._type is None:
            return nullcontext()
        return torch.autocast(self._device, dtype=self._type)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss to call backward() on."""
        if self.scaler is None:
            return loss
        self.losses.append(loss.detach())
        scaled: torch.Tensor = self.scaler.scale(loss)
        return scaled


# Below this scale, gradients that overflow would overflow without scaling as well.
_SMALLEST_SCALE = 1.0


@dataclass(frozen=True)
class StepResult:
    """The result of a step, the same on every rank, unless ranks exchange weights."""

    norm: float
    skipped: bool = False
    fault: bool = False


def _require_moving(model: torch.nn.Module, ema: float) -> None:
    """Refuse weights of a type in which averages lose what a step adds to them."""
    trained = ((name, weight) for name, weight in model.named_parameters() if weight.requires_grad)
    for name, weight in trained:
        if weight.is_floating_point() and torch.finfo(weight.dtype).eps > 1 - ema:
            raise UsageError(
                f"--ema {ema:g}: an average in {weight.dtype}, the type of {name}, is too coarse "
                "to move by this part of a difference: build the model in float32, which --amp "
                "computes with in 16 bits, or leave --ema out"
            )


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
            _require_moving(model, ema)
            average = get_ema_multi_avg_fn(ema)
            self.averaged = AveragedModel(model, multi_avg_fn=average)
        self._samples = 1  # until begin(), without which gradients count, too

    def begin(self, sizes: Sequence[int]) -> None:
        self._optimizer.zero_grad()
        self._samples = sum(sizes)
        exchange = self._optimizer.exchange
        if exchange is None or exchange.takes_samples:
            self._optimizer.sample_weight = self._samples
        passes = max(1, len(sizes))
        if self._optimizer.backward_passes_per_step != passes:
            self._optimizer.set_backward_passes_per_step(passes)

    @collective
    def backward(self, loss: torch.Tensor, samples: int) -> None:
        """Add the gradient of one microbatch; the last one starts the reduction."""
        share = samples / self._samples if samples else 0.0
        weighted = loss if share == 1.0 else loss * share
        self.precision.scaled(weighted).backward()

    @collective
    def step(self) -> StepResult:
        """Reduce what is left, then step unless the gradient is not finite."""
        if self._optimizer.exchanges_weights:
            return self._local_step()
        optimizer, scaler, largest = self._optimizer, self.precision.scaler, self._clip_norm
        shared = optimizer.sharded and scaler is None  # of gradients this rank has its slices
        if shared:
            norm = optimizer.clip_grad_norm_(math.inf).item()  # reduces the rest; clips nothing
            if largest is not None and largest < norm < math.inf:
                optimizer.scale_gradients(largest / norm)
        else:
            optimizer.synchronize()
            if scaler is not None:
                scaler.unscale_(optimizer)
            norm = self._clip()
        finite = math.isfinite(norm)
        if finite:
            complete_momenta(optimizer)
            with nullcontext() if shared else optimizer.skip_synchronize():
                if scaler is None:
                    optimizer.step()
                else:
                    scaler.step(optimizer)
            if self.averaged is not None:
                self.averaged.update_parameters(self._model)
        if scaler is not None:
            scaler.update()
        fault = not finite and self._is_real_overflow()
        self.precision.losses.clear()
        return StepResult(norm, skipped=not finite, fault=fault)

    def _local_step(self) -> StepResult:
        """Step on the gradient of this rank, and exchange weights if that is due."""
        norm = self._clip()
        finite = math.isfinite(norm)
        if not (finite and self._samples):
            self._optimizer.zero_grad()  # then the step leaves the weights as they are
        complete_momenta(self._optimizer)
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

    def _clip(self) -> float:
        """Return the norm of the gradients, and scale them if it is finite and too large."""
        groups = self._optimizer.param_groups
        parameters = [p for group in groups for p in group["params"] if p.grad is not None]
        for parameter in parameters:
            if parameter.grad.layout is torch.sparse_coo:
                parameter.grad = parameter.grad.coalesce()  # which has each element once
        gradients = [_elements(parameter.grad) for parameter in parameters]
        norm, largest = float(total_norm(gradients).item()), self._clip_norm
        if largest is not None and largest < norm < math.inf:
            torch._foreach_mul_(gradients, largest / norm)
        return norm

    @collective
    def _is_real_overflow(self) -> bool:
        """Return whether a smaller loss scale would not have helped."""
        scaler = self.precision.scaler
        if scaler is None or scaler.get_scale() < _SMALLEST_SCALE:
            return True
        finite = all(bool(loss.isfinite().all()) for loss in self.precision.losses)
        return not all(hvd.allgather_object(finite, name="finite losses"))


def complete_momenta(optimizer: torch.optim.Optimizer) -> None:
    """Begin momenta late: where others have them, torch's fused SGD fails on the first gradient."""
    if getattr(optimizer, "sharded", False):
        return
    for group in optimizer.param_groups:
        if group.get("fused") and group.get("momentum") and not group.get("dampening"):
            used = [p for p in group["params"] if p.grad is not None]
            late = [p for p in used if optimizer.state.get(p, {}).get("momentum_buffer") is None]
            for parameter in late if len(late) < len(used) else ():
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor's elements, which a sparse one may have more than once."""
    elements = tensor._values() if tensor.layout is torch.sparse_coo else tensor
    return torch.view_as_real(elements) if elements.is_complex() else elements


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


ADVICE = (
    "Lower --lr, lengthen --warmup-epochs, set --clip-norm, look at the samples of this step, or "
    "leave such steps out with --non-finite skip"
)

Loss = Callable[[], torch.Tensor]


@collective
def non_finite_cause(step: int, model: torch.nn.Module, losses: Iterable[Loss]) -> str:
    """Describe which ranks and parameters made this step's gradient not finite.

    The gradients are computed again, each rank's own, before they are reduced. They are discarded,
    and buffers are left unchanged.
    """
    ranks: dict[str, list[int]] = {}
    for rank, found in enumerate(allgather_object(_find(model, losses), "not finite")):
        if found:
            ranks.setdefault(found, []).append(rank)
    parts = [f"{found} on {format_ranks(where)}" for found, where in ranks.items()]
    if not parts:
        parts = [
            "the gradient over all ranks is not finite, though each rank's own is: its sum or its "
            "norm is too large"
        ]
    return f"step {step}: {'; '.join(parts)}"


def _find(model: torch.nn.Module, losses: Iterable[Loss]) -> str:
    """Describe the first value that is not finite: a weight, or a microbatch's loss or gradient.

    All losses are computed in any case: models may communicate in both passes.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    name = _first_non_finite(named)
    findings = [f"the weight of {name!r} is not finite"] if name else []
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        for loss_of in losses:
            loss = loss_of()
            gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
            name = _first_non_finite(dict(zip(named, gradients, strict=True)))
            if not loss.isfinite().all():
                findings.append(f"the loss is {loss.item()}")
            elif name:
                findings.append(f"the gradient of {name!r} is not finite")
    finally:
        for buffer, before in buffers:
            buffer.copy_(before)
    return findings[0] if findings else ""


def _first_non_finite(tensors: Mapping[str, torch.Tensor | None]) -> str:
    for name, tensor in tensors.items():
        if tensor is not None and not _elements(tensor).isfinite().all():
            return name
    return ""


class NonFinitePolicy:
    """Stops the run, or warns of steps and updates that are left out, as --non-finite asks for."""

    def __init__(self, action: str, rank: int) -> None:
        self._stops, self._rank = action == "stop", rank
        self._left_out = 0

    @collective
    def handle(self, step: int, model: torch.nn.Module, losses: Iterable[Loss]) -> None:
        self._stop_or_warn(non_finite_cause(step, model, losses), "; the step is left out")

    def count_left_out(self, skipped: bool) -> None:
        """Count an update of this rank alone, if it was left out."""
        self._left_out += skipped

    @collective
    def report_left_out(self, step: int) -> None:
        """Report the updates that ranks have left out since the last call."""
        counts, self._left_out = allgather_object(self._left_out, name="skips"), 0
        ranks = [rank for rank, count in enumerate(counts) if count]
        if ranks:
            self._stop_or_warn(
                f"until step {step}: {counted(sum(counts), 'update')} left out on "
                f"{format_ranks(ranks)}, where the gradient of the rank was not finite",
                "",
            )

    def _stop_or_warn(self, text: str, consequence: str) -> None:
        if self._stops:
            raise NotFiniteError(f"{text}. {ADVICE}")
        if self._rank == 0:
            print(f"hvdtrain: {text}{consequence}", file=sys.stderr, flush=True)
