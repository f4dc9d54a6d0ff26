"""The forward pass of a torch model: its outputs and its loss, in mixed precision."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

import hvdtrain.torch as hvd
from hvdtrain.advice import did_you_mean
from hvdtrain.collective import collective
from hvdtrain.compiled.library import find_compiler
from hvdtrain.errors import UsageError
from hvdtrain.train.torch.evaluation import call_model

_AVERAGED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Where CXX is not set; torch looks for no other.
_COMPILERS_OF_INDUCTOR = ("g++",)


def compile_model(model: torch.nn.Module, backend: str) -> Any:
    """Return the model compiled by torch.compile when it is first called."""
    if backend not in torch.compiler.list_backends(exclude_tags=None):
        known: list[str] = torch.compiler.list_backends()
        near = did_you_mean(backend, known)
        raise UsageError(
            f"--compile {backend}: torch has no such backend{near or ':'} it has {', '.join(known)}"
        )
    if backend == "inductor" and any(p.device.type == "cpu" for p in model.parameters()):
        try:
            find_compiler(os.environ, _COMPILERS_OF_INDUCTOR)
        except UsageError as error:
            raise UsageError(f"--compile {backend}: {error}") from None
    return torch.compile(model, backend=backend)


def require_scalar(loss: Any) -> None:
    """Check that the loss of a recipe is one number."""
    if isinstance(loss, torch.Tensor) and not loss.ndim:
        return
    shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else ""
    raise UsageError(
        f"the loss of a recipe must return one number, the mean over the batch, as a torch.Tensor "
        f"without dimensions, got a {type(loss).__name__}{shape}"
    )


@collective
def average_model_buffers(model: torch.nn.Module, ranks: int | None = None) -> None:
    """Make a model's buffers equal on all ranks.

    Floating-point buffers of 16 bits and more are averaged; others are copied from rank 0. Batch
    normalization keeps running means and variances of the samples that a rank has seen; they do
    not change what is learned, but they change the results of an evaluation.
    """
    ranks = hvd.size() if ranks is None else ranks
    buffers = list(model.buffers())
    floating = [buffer for buffer in buffers if buffer.dtype in _AVERAGED]
    if floating:
        if hvd.rank() >= ranks:
            for buffer in floating:
                buffer.zero_()
        hvd.grouped_allreduce_(floating, name="buffers", postscale_factor=1 / ranks, op=hvd.Sum)
    rest = [(str(n), b) for n, b in enumerate(buffers) if b.dtype not in _AVERAGED]
    if rest:
        hvd.broadcast_parameters(rest, root_rank=0)


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


class ForwardPass:
    """The forward pass of a model and its loss."""

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Callable[[Any, Any], Any],
        precision: Precision,
        compiler: str | None,
    ) -> None:
        self._model, self._loss, self._precision = model, loss, precision
        self._call = model if compiler is None else compile_model(model, compiler)

    def outputs(self, inputs: Any) -> Any:
        """Return the outputs of the model, in the mode that it is in."""
        return self._outputs(self._call, inputs)

    def in_evaluation(self, averaged: torch.nn.Module | None) -> Callable[[Any], Any]:
        """Return the forward pass in evaluation mode."""
        (self._model if averaged is None else averaged).eval()
        return partial(self._outputs, self._call if averaged is None else averaged)

    def _outputs(self, model: Callable[..., Any], inputs: Any) -> Any:
        with self._precision.autocast():
            return call_model(model, inputs)

    def mean_loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        """Return the mean loss over a batch, []."""
        with self._precision.autocast():
            loss: torch.Tensor = self._loss(outputs, targets)
        require_scalar(loss)
        return loss
