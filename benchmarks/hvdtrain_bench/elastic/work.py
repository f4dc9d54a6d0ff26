"""The work of a job: the same model, samples and number of steps for every library."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hvdtrain_bench.cases.models import small_mlp
from hvdtrain_bench.elastic.notes import SAMPLES

_INPUTS, _CLASSES = 784, 10


def build_model() -> nn.Module:
    """Return a model of 2.9 million parameters, the same on every rank."""
    torch.manual_seed(1)
    return small_mlp()


def make_optimizer(model: nn.Module) -> torch.optim.SGD:
    """Return SGD with momentum, so that there is a state beside the weights."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def make_samples() -> tuple[Tensor, Tensor]:
    """Return inputs [SAMPLES, 784] and classes [SAMPLES], the same on every rank."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(SAMPLES, _INPUTS, generator=generator)
    return inputs, torch.randint(_CLASSES, (SAMPLES,), generator=generator)
