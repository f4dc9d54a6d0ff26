"""A recipe whose model fails under one strategy, and never ends under another."""

import time

import numpy as np
import torch
from torch import nn

from hvdtrain.core import context
from hvdtrain.data.dataset import Samples
from hvdtrain.train import Recipe


class Faulty(nn.Linear):
    """Raises under DDP, and sleeps under hvdtrain, on rank 1."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            raise ArithmeticError("nothing\nadds up")
        if context.is_initialized() and context.current().topology.rank == 1:
            time.sleep(3600)
        outputs: torch.Tensor = super().forward(inputs)
        return outputs


def recipe() -> Recipe:
    numbers = np.random.default_rng(0)
    points = numbers.normal(size=(24, 4)).astype(np.float32)
    labels = (points.sum(axis=1) > 0).astype(np.int64)
    return Recipe(Faulty(4, 2), Samples(points, labels), nn.functional.cross_entropy)
