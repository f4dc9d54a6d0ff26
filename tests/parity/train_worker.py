"""Trains through the Python API, several times in one world: train_worker.py CASES.

CASES is a JSON list of TrainOptions with one key more, "kind", which says what is watched or
changed on the way; each rank reports one result for each case.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ranks import report
from torch import nn

import hvdtrain.torch as hvd
from hvdtrain.data.dataset import Dataset, Samples
from hvdtrain.errors import UsageError
from hvdtrain.train import stopping
from hvdtrain.train.checkpoint import checkpoint_files
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.recipe import TorchRecipe
from hvdtrain.train.recipes import digits
from hvdtrain.train.requeue import MARKER
from hvdtrain.train.session import train


class Watched(nn.Module):
    """A linear model on numbered samples that notes which of them it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 2)
        self.seen: dict[str, list[int]] = {"train": [], "test": []}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen["train" if self.training else "test"] += inputs[:, 0].int().tolist()
        scores: torch.Tensor = self.layer(inputs / 100)
        return scores


class Drifting(nn.Module):
    """The digits model, except that rank 1's weights move a little in the first evaluation."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.moved = hvd.rank() != 1

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.training and not self.moved:
            self.moved = True
            next(self.parameters()).view(-1)[0] += 1e-6
        scores: torch.Tensor = self.model(inputs)
        return scores


def numbered(start: int, count: int) -> Samples:
    numbers = np.arange(start, start + count)
    return Samples(numbers[:, None].astype(np.float32), (numbers % 2).astype(np.int64))


def watched(recipe: TorchRecipe, models: list[Watched], samples: int) -> TorchRecipe:
    """Train on samples that are numbered from 0, and test on 5, numbered from 100."""

    def build() -> nn.Module:
        models.append(Watched())
        return models[-1]

    data = Dataset(numbered(0, samples), numbered(100, 5))
    return replace(recipe, build_model=build, load_data=lambda: data)


def drifting(recipe: TorchRecipe) -> TorchRecipe:
    return replace(recipe, build_model=lambda: Drifting(recipe.build_model()))


def stopped(recipe: TorchRecipe, step: int) -> TorchRecipe:
    """Have the last rank get a signal in a step, counted from 1."""
    steps = 0

    def count(model: nn.Module, _: object) -> None:
        nonlocal steps
        steps += model.training
        if steps == step and hvd.rank() == hvd.size() - 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    def build() -> nn.Module:
        model = recipe.build_model()
        model.register_forward_pre_hook(count)
        return model

    return replace(recipe, build_model=build)


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Train one case; return its summary with the samples that this rank saw, or the refusal."""
    kind, out, original = case.pop("kind"), Path(case.pop("out")), digits.recipe
    stopping._EVERY_SECONDS = 0.0 if kind == "stopped" else 0.5
    models: list[Watched] = []
    if kind == "watched":
        digits.recipe = watched(original, models, samples=9)
    elif kind == "scarce":
        digits.recipe = watched(original, models, samples=2)
    elif kind == "drifting":
        digits.recipe = drifting(original)
    elif kind == "stopped":
        digits.recipe = stopped(original, case.pop("step"))
    try:
        summary = train(TrainOptions(out=out, quiet=True, **case))
    except UsageError as error:
        return {"refused": str(error)}
    finally:
        digits.recipe = original
    if summary is None:
        files = [path.name for path in checkpoint_files(out)]
        return {"newest": files[0], "marker": (out / MARKER).read_text()}
    return {**asdict(summary), "seen": models[-1].seen if models else None}


results = [run(case) for case in json.loads(sys.argv[1])]
report(len(results), results)
