"""A small regression that ignite_training.py trains, and its test without Ignite."""

import torch
from torch.utils.data import TensorDataset


def data(samples: int = 48) -> TensorDataset:
    inputs = torch.randn(samples, 4, generator=torch.Generator().manual_seed(1)).double()
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)]
    return torch.nn.Sequential(*layers).double()
