"""The forward pass of a torch model: its outputs and its loss, in mixed precision."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from hvdtrain.train.torch.evaluation import call_model
from hvdtrain.train.torch.model import compile_model, require_scalar

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
