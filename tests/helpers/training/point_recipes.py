"""Recipes of a user's, good and bad."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import hvdtrain.torch as hvd
from hvdtrain.data import Samples
from hvdtrain.train import Callback, CallbackState, Recipe
from hvdtrain.train.metrics import Accuracy, ConfusionMatrix, Gathered, MeanOf, TopK

CLASSES = 3


def area(outputs: Any, targets: Any) -> float:
    scores = outputs[:, -1]
    own, other = scores[targets == CLASSES - 1], scores[targets != CLASSES - 1]
    return float(np.mean(own[:, None] > other[None, :]))


def points(count: int, seed: int) -> Samples:
    labels = np.arange(count) % CLASSES
    noise = np.random.default_rng(seed).normal(size=(count, 6))
    return Samples((noise + labels[:, None]).astype(np.float32), labels.astype(np.int64))


def recipe(width: int = 8) -> Recipe:
    layers = torch.nn.Linear(6, width), torch.nn.Tanh(), torch.nn.Linear(width, CLASSES)
    return Recipe(
        model=torch.nn.Sequential(*layers),
        train=points(203, 0),
        loss=torch.nn.functional.cross_entropy,
        test=points(301, 1),
        metrics={
            "accuracy": Accuracy(),
            "top2": TopK(2),
            "confusion": ConfusionMatrix(CLASSES),
            "area": Gathered(area),
            "size": MeanOf(lambda outputs, targets: outputs.abs().mean(dim=1)),  # grows
        },
        classes=["red", "green", "blue"],
    )


def from_text() -> Recipe:
    return replace(recipe(), read=lambda path: np.loadtxt(path, np.float32, delimiter=","))


def of_vectors() -> Recipe:
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    return replace(recipe(), loss=loss)


def without_test() -> Recipe:
    return replace(recipe(), test=None)


def of_one_number() -> Recipe:
    loss = torch.nn.L1Loss()
    return replace(recipe(), model=torch.nn.Linear(6, 1), loss=lambda o, t: loss(o[:, 0], t))


class Breaking(torch.nn.Linear):
    least = 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows[:, int(self.training and hvd.rank() >= self.least) :])


def breaking(least: int = 0) -> Recipe:
    model = Breaking(6, CLASSES)
    model.least = least
    return replace(recipe(), model=model)


class Killing(Callback):
    def on_train_batch_end(self, state: CallbackState) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Clamping(Callback):
    def on_train_batch_end(self, state: CallbackState) -> None:
        state.model[0].weight.detach().clamp_(-0.01, 0.01)


def clamped() -> Recipe:
    return replace(recipe(), callbacks=[Clamping()])


class Thawing(Callback):
    def on_epoch_begin(self, state: CallbackState) -> None:
        state.model[0].requires_grad_(state.epoch > 0)


def thawed() -> Recipe:
    made = replace(recipe(), callbacks=[Thawing()])
    made.model[0].requires_grad_(False)
    return made


def killed() -> Recipe:
    return replace(recipe(), callbacks=[Killing()])


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        data = points(60, 0)
        yield from zip(data.inputs, data.labels, strict=True)


def endless() -> Recipe:
    return replace(recipe(), train=Stream())


def stream(samples: int = 60) -> Recipe:
    return replace(from_text(), train=Stream(), samples_per_epoch=samples)


def nothing() -> None:
    pass
