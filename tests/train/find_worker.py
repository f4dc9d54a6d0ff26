"""Finds learning rates and batch sizes, several in one world; reports results of each rank."""

import contextlib
import io
import os
import signal
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from ranks import report

import hvdtrain.torch as hvd
from hvdtrain.data import Samples
from hvdtrain.errors import TrainingError
from hvdtrain.train import Recipe, find_batch_size, find_lr

ROWS: Any = np.random.default_rng(0).normal(size=(40, 3))
TARGETS = ROWS @ np.array([[1.0], [-2.0], [3.0]]) + 1
# All samples in each step, so that the losses are those of gradient descent.
WHOLE: dict[str, Any] = {"global_batch_size": 40, "momentum": 0.0, "dtype": "float64"}


class Model(torch.nn.Linear):
    """A layer that has no memory for more than `most` samples on the last rank."""

    most = 1 << 30
    stops = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if hvd.rank() == hvd.size() - 1:
            if len(inputs) > self.most:
                torch.empty(1 << 55)
            if self.stops:
                os.kill(os.getpid(), signal.SIGUSR1)
        return super().forward(inputs)


def recipe(**changes: Any) -> Recipe:
    model = Model(3, 1, bias=False).double()
    vars(model).update(changes)
    with torch.no_grad():
        model.weight.zero_()
    return Recipe(model, Samples(ROWS, TARGETS), torch.nn.functional.mse_loss)


def overflowing(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return a loss that is infinite once it is above that of the first weights."""
    loss = torch.nn.functional.mse_loss(outputs, targets)
    return loss * (1.0 if loss < 1.01 * (targets**2).mean() else float("inf"))


def found(find: Callable[..., Any], given: Recipe, **options: Any) -> dict[str, Any]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            values = asdict(find(lambda: given, **options))
        except TrainingError as error:
            values = {"failed": str(error)}
    kept = not any(weight.any() for weight in given.model.parameters())
    return {**values, "said": said.getvalue(), "kept": kept}


results = [
    found(find_lr, recipe(), **WHOLE),
    found(find_lr, recipe(), **WHOLE, lr_scaling="none"),
    found(find_lr, replace(recipe(), loss=lambda outputs, _: outputs.sum() * 0 + 1), **WHOLE),
    found(find_lr, recipe(stops=True), **WHOLE),
    found(find_lr, replace(recipe(), loss=overflowing), **WHOLE),
    found(find_lr, replace(recipe(), loss=lambda outputs, _: outputs.sum() / 0), **WHOLE),
    found(find_batch_size, recipe(most=4), steps=2, batch_size=2),
    found(find_batch_size, recipe(), steps=2, batch_size=20, lr_scaling="sqrt"),
    found(find_batch_size, recipe(most=4), steps=2, batch_size=8),
]
report(len(results), results)
