"""The weights and the optimizer of a run with torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hvdtrain.train.frameworks.protocol import Array

__all__ = ["TorchState"]


class TorchState:
    """A model and its optimizer.

    Args:
        model: whose parameters and buffers count.
        optimizer: of its parameters.
    """

    suffix = "pt"

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def weights(self) -> dict[str, Array]:
        """Return all parameters and buffers by name."""
        tensors = self._model.state_dict().items()
        return {name: tensor.detach().cpu().numpy() for name, tensor in tensors}

    def content(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        return {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}

    def load(self, content: Mapping[str, Any]) -> None:
        """Take over what content() gave.

        Raises:
            ValueError, KeyError, TypeError, AttributeError, RuntimeError: it lacks something.
        """
        _require_optimizer(content["optimizer"], self._optimizer)
        self._model.load_state_dict(content["model"])
        self._optimizer.load_state_dict(content["optimizer"])


def _require_optimizer(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Check what load_state_dict() does not, and the next step needs.

    Raises:
        ValueError: a group lacks a setting, or has one of another type.
        KeyError, TypeError: the state has another form.
    """
    own = optimizer.state_dict()["param_groups"]
    for group, expected in zip(saved["param_groups"], own, strict=True):
        for name, value in expected.items():
            if name not in group or not _is_like(group[name], value):
                raise ValueError(f"its optimizer has no proper {name}")
    parameters = [item for group in optimizer.param_groups for item in group["params"]]
    for number, state in saved["state"].items():
        shape = parameters[number].shape
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape not in (shape, torch.Size([])):
                raise ValueError(f"its optimizer's {name} has shape {tuple(value.shape)}")


def _is_like(value: object, expected: object) -> bool:
    """Tell whether a setting may stand where this one stood; None stands for a choice."""
    if isinstance(expected, float):
        return isinstance(value, (int, float))
    return expected is None or isinstance(value, type(expected))
