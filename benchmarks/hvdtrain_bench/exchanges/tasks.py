"""Small tasks with real data, on which exchanges are compared by the loss that they reach."""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from hvdtrain.data.dataset import Samples as ImageSamples
from hvdtrain.data.digits import load_digits
from hvdtrain.train.recipes.builtin.transformer import Transformer
from hvdtrain_bench.cases.models import MODELS

_CONTEXT, _TEXT_CHARACTERS, _TEST_WINDOWS = 32, 1 << 20, 512
_ASCII = 128
_BATCH = 32


@dataclass(frozen=True)
class Samples:
    """Samples in memory.

    Attributes:
        inputs: [n, ...].
        targets: int64 [n, ...].
    """

    inputs: Tensor
    targets: Tensor

    def batches(self, rank: int, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's batches, forever: each epoch in another order."""
        generator = torch.Generator().manual_seed(seed)
        step = _BATCH * size
        while True:
            order = torch.randperm(len(self.inputs), generator=generator)
            for start in range(0, len(order) - step + 1, step):
                own = order[start + rank * _BATCH : start + (rank + 1) * _BATCH]
                yield self.inputs[own], self.targets[own]


@dataclass(frozen=True)
class LossTask:
    """A model, its data and its optimizer.

    Attributes:
        factor: returns the factor of the learning rate in a step, given its number from 0 and the
            number of all steps; None if the rate is constant.
        batch: samples per rank and step.
    """

    title: str
    data: Callable[[], tuple[Samples, Samples]]
    build: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], Optimizer]
    factor: Callable[[int, int], float] | None = None
    batch: int = _BATCH

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy, a scalar.

        Args:
            outputs: scores, float32 [n, classes, ...].
            targets: classes, int64 [n, ...].
        """
        return F.cross_entropy(outputs, targets)


def _digits(size: int) -> tuple[Samples, Samples]:
    """Return scikit-learn's digits, float32 [n, 1, size, size]."""
    found = load_digits()

    def samples(given: ImageSamples) -> Samples:
        inputs = F.interpolate(torch.from_numpy(given.inputs), (size, size))
        return Samples(inputs, torch.from_numpy(given.labels))

    return samples(found.train), samples(found.test)


def _text() -> tuple[Samples, Samples]:
    """Return windows of Python's own source code, int64 [n, 32]; targets are one further."""
    folder = Path(sysconfig.get_path("stdlib"))
    sources = (path.read_bytes() for path in sorted(folder.glob("*.py")))
    text = np.frombuffer(b"".join(sources)[:_TEXT_CHARACTERS], np.uint8)
    tokens = torch.from_numpy(np.minimum(text, _ASCII - 1).astype(np.int64))
    count = (len(tokens) - 1) // _CONTEXT
    inputs = tokens[: count * _CONTEXT].reshape(count, _CONTEXT)
    targets = tokens[1 : count * _CONTEXT + 1].reshape(count, _CONTEXT)
    first = count - _TEST_WINDOWS
    return Samples(inputs[:first], targets[:first]), Samples(inputs[first:], targets[first:])


def _digits_network() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


def _sgd(module: nn.Module) -> Optimizer:
    return SGD(module.parameters(), lr=0.05, momentum=0.9)


def _adamw(module: nn.Module) -> Optimizer:
    return AdamW(module.parameters(), lr=1e-3)


def _character_transformer() -> nn.Module:
    return Transformer(_ASCII, _CONTEXT, 64, 2, 4)


def _cosine(step: int, steps: int) -> float:
    """Rise over the first twentieth of the steps, then follow half a period of a cosine to 0."""
    rising = steps // 20
    if step < rising:
        return (step + 1) / rising
    return (1 + math.cos(math.pi * (step - rising) / (steps - rising))) / 2


TASKS = {
    "digits": LossTask("MLP on digits", lambda: _digits(8), _digits_network, _sgd),
    "text": LossTask("character transformer", _text, _character_transformer, _adamw),
    "text-decay": LossTask(
        "character transformer whose learning rate decays",
        _text,
        _character_transformer,
        _adamw,
        _cosine,
    ),
    "mnist-cnn": LossTask(
        "MNIST CNN on digits", lambda: _digits(28), MODELS["mnist-cnn"].build, _sgd
    ),
}
