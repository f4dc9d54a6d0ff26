"""Recipes whose rank 1 is killed in an evaluation, or loses the process that loads its data."""

import os
import signal
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hvdtrain.core import context
from hvdtrain.train.recipe import Recipe
from hvdtrain.train.recipes.torch_recipes import digits


def kill_on_rank_1(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


class KilledInEvaluation(nn.Sequential):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.training:
            kill_on_rank_1(context.current().topology.rank)
        outputs: torch.Tensor = super().forward(inputs)
        return outputs


class KilledInLoading:
    """Samples of another process, in which this rank has no world."""

    def __init__(self, samples: Any, rank: int) -> None:
        self._samples, self._rank = samples, rank

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        if torch.utils.data.get_worker_info() is not None:
            kill_on_rank_1(self._rank)
        return self._samples[index]


def evaluated() -> Recipe:
    plain = digits()
    return replace(plain, model=KilledInEvaluation(plain.model))


def loaded() -> Recipe:
    plain = digits()
    return replace(plain, train=KilledInLoading(plain.train, context.current().topology.rank))
