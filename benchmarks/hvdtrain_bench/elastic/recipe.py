"""The job as a recipe of `hvdtrain train`; BENCH_NOTES names the folder of its notes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvdtrain.data.dataset import Samples
from hvdtrain.train.recipe import Recipe
from hvdtrain_bench.elastic.notes import SAMPLES, Notes
from hvdtrain_bench.elastic.work import build_model, make_samples
from hvdtrain_bench.elastic.worlds import begin_world


class _Model(nn.Module):
    """The model, which notes its samples: their first inputs tell their numbers."""

    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self.inner, self._notes = build_model(), notes

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self._notes.begin((inputs[:, 0] * SAMPLES).round().long().tolist())
        outputs: Tensor = self.inner(inputs)
        return outputs


class _Optimizer(torch.optim.SGD):
    notes: Notes

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        found = super().step(closure)
        self.notes.end()
        return found


def recipe() -> Recipe:
    notes = begin_world(Path(os.environ["BENCH_NOTES"]))
    inputs, targets = make_samples()
    inputs[:, 0] = torch.arange(SAMPLES) / SAMPLES

    def optimizer(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        made = _Optimizer(parameters, lr=lr, momentum=0.9)
        made.notes = notes
        return made

    samples = Samples(inputs.numpy(), targets.numpy())
    return Recipe(_Model(notes), samples, F.cross_entropy, optimizer=optimizer)
