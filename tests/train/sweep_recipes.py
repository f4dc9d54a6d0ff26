"""Recipes whose loss after training is known."""

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hvdtrain.torch as hvd
from hvdtrain.data import Samples
from hvdtrain.train import Recipe
from hvdtrain.train.metrics import MeanOf


class Bowl(torch.nn.Module):
    """Gives (x - 3)^2 for each sample, and one more of kind "high"."""

    def __init__(self, x: float, kind: str) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(()))
        self.value = (x - 3) ** 2 + (kind == "high")

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.value + 0 * (inputs[:, 0] + self.bias)


def recipe(x: float = 0.0, kind: str = "low", how: str = "well") -> Recipe:
    if how == "refused":
        raise ValueError("there is no such model")
    rows = Samples(np.zeros((24, 1), np.float32), np.zeros(24, np.float32))

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> Any:
        if how == "raises":
            raise RuntimeError("this layer does not fit")
        if how == "stopped" and hvd.rank() == hvd.size() - 1 and not Path("stopped").exists():
            Path("stopped").touch()
            os.kill(os.getpid(), signal.SIGUSR1)
        if how == "killed" and hvd.rank() == hvd.size() - 1:
            with suppress(FileExistsError):
                Path("killed-once").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        return outputs.mean() * (float("nan") if how == "infinite" else 1)

    height = MeanOf(lambda outputs, targets: -outputs, higher_is_better=True)
    return Recipe(Bowl(x, kind), rows, loss, rows, metrics={"height": height})
