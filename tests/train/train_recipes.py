"""What train_worker.py trains: functions by the names that its cases call their kinds."""

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

import hvdtrain.torch as hvd
from hvdtrain.data.dataset import Samples
from hvdtrain.errors import UnsupportedError
from hvdtrain.train import Callback, CallbackState, LearningRateMonitor, RestoreBestWeights
from hvdtrain.train.metrics import Accuracy
from hvdtrain.train.recipe import Recipe
from hvdtrain.train.recipes.torch_recipes import cross_entropy
from hvdtrain.train.recipes.torch_recipes import digits as plain


class Watched(nn.Module):
    """A model of numbered samples that notes which of them it has seen."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers
        self.seen: dict[str, list[int]] = {"train": [], "test": []}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen["train" if self.training else "test"] += inputs[:, 0].int().tolist()
        scores: torch.Tensor = self.layers(inputs / 100)
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


class Sinking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.weight * inputs[:, 0]


class Carrying(nn.Module):
    """Computes with state of all kinds that a checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.polar(torch.ones(2), torch.ones(2)))
        self.lazy, self.calls = nn.LazyLinear(2), 0
        self.register_buffer("codes", torch.ones(2).to(torch.float8_e4m3fn))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        codes = self.get_buffer("codes")
        assert (self.turn.dtype, codes.dtype) == (torch.complex64, torch.float8_e4m3fn)
        if self.training:
            self.calls += 1
            codes.copy_(codes.float() + 1)
        scores: torch.Tensor = self.lazy(inputs / 100) * codes.float() * (1 + 1 / (1 + self.calls))
        return (scores * self.turn).real

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Counting(torch.optim.SGD):
    """Has state that is of no parameter."""

    def step(self, closure: Any = None) -> Any:
        state: dict[Any, Any] = self.state
        state["calls"] = state.get("calls", 0) + 1
        for parameter in self.param_groups[0]["params"]:
            parameter.grad /= state["calls"]
        return super().step(closure)


class Random:
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        chance = random.random() + float(np.random.rand()) + torch.rand(4)
        return chance + index / 100, index % 2


class Stream:
    def __init__(self, count: int) -> None:
        self._count, self._epoch = count, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        for number in range(self._count):
            index = (number * 7 + self._epoch) % self._count
            yield torch.full((1,), float(index)), index % 2


def numbered(start: int, count: int) -> Samples:
    numbers = np.arange(start, start + count)
    return Samples(numbers[:, None].astype(np.float32), (numbers % 2).astype(np.int64))


def watched(samples: int = 9) -> Recipe:
    """A linear model on samples that are numbered from 0, tested on 5, numbered from 100."""
    model = Watched(nn.Linear(1, 2))
    train, test = numbered(0, samples), numbered(100, 5)
    return Recipe(model, train, cross_entropy(0.0), test, metrics={"accuracy": Accuracy()})


def scarce() -> Recipe:
    return watched(2)


def noisy() -> Recipe:
    layers = nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 2))
    return replace(watched(100), model=Watched(layers))


def normed() -> Recipe:
    layers = nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    return replace(watched(100), model=Watched(layers))


def synchronized() -> Recipe:
    layers = nn.Sequential(nn.Linear(1, 8), hvd.SyncBatchNorm(8), nn.ReLU(), nn.Linear(8, 2))
    return replace(watched(10), model=Watched(layers))


def tainted() -> Recipe:
    recipe = synchronized()
    recipe.train.inputs[3] = np.nan
    return recipe


def carrying() -> Recipe:
    model = Carrying()
    model(torch.ones(1, 1))  # which gives the lazy layer its shape
    return replace(watched(100), model=model, optimizer=lambda p, lr: Counting(p, lr, momentum=0.9))


def embedded() -> Recipe:
    sparse = nn.Sequential(nn.Embedding(9, 2, sparse=True))
    return replace(watched(), model=sparse)


def slow() -> Recipe:
    recipe = noisy()
    recipe.model.register_forward_pre_hook(lambda *_: time.sleep(0.02))
    return recipe


def poisoned() -> Recipe:
    recipe = noisy()
    recipe.train.inputs[37] = np.nan
    return recipe


def drifting() -> Recipe:
    recipe = plain()
    return replace(recipe, model=Drifting(recipe.model))


def mapped() -> Recipe:
    return Recipe(
        nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2)),
        Random(),
        cross_entropy(0.0),
        test=Random(),
        augment=lambda inputs, generator: inputs * generator.uniform(0.5, 1.5),
    )


def streamed(count: int = 60) -> Recipe:
    """An iterable that yields so many of the 50 samples of an epoch."""
    return replace(watched(), train=Stream(count), samples_per_epoch=50)


def short() -> Recipe:
    return streamed(47)


def valley() -> Recipe:
    """A weight that loses the learning rate in each step; the test loss is (weight + 0.42)²."""

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.where(targets == 0, outputs, (outputs + 0.42).square()).mean()

    def samples(count: int, label: int) -> Samples:
        return Samples(np.ones((count, 1), np.float32), np.full(count, label))

    return Recipe(Sinking(), samples(12, 0), loss, test=samples(5, 1))


class Noting(Callback):
    """Notes rate and loss of each step, and the other moments."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_begin(self, state: CallbackState) -> None:
        self.seen.append(["begin", state.epoch, state.step])

    def on_train_batch_end(self, state: CallbackState) -> None:
        assert state.optimizer.param_groups[0]["lr"] == state.lr
        self.seen.append([state.epoch, state.step, state.lr, state.train["loss"]])

    def on_epoch_end(self, state: CallbackState) -> None:
        self.seen.append(["end", state.epoch, state.train["loss"], state.test["loss"]])


class Stopping(Callback):
    def on_train_batch_end(self, state: CallbackState) -> None:
        self.stop = (state.rank, state.step) == (1, 5)


class Failing(Callback):
    def on_train_batch_end(self, state: CallbackState) -> None:
        if (state.rank, state.step) == (2, 4):
            raise UnsupportedError("as\ntold")  # as an operation of this rank alone


class Changing(Callback):
    """Changes weights, momenta and settings between steps; the first parameter begins frozen."""

    def on_epoch_begin(self, state: CallbackState) -> None:
        parameters = list(state.model.parameters())
        state.model.seen.setdefault("sums", []).append(float(parameters[0].sum()))
        parameters[0].requires_grad_(state.epoch == 2)
        state.optimizer.param_groups[0]["weight_decay"] = 0.1 * state.epoch
        with torch.no_grad():
            torch._foreach_mul_(parameters, 0.5)

    def on_epoch_end(self, state: CallbackState) -> None:
        torch._foreach_mul_([each["momentum_buffer"] for each in state.optimizer.state.values()], 2)


class Rating(Callback):
    def on_epoch_end(self, state: CallbackState) -> None:
        state.optimizer.param_groups[0]["lr"] /= 2


def changing() -> Recipe:
    return replace(watched(), callbacks=[Changing()])


def rated() -> Recipe:
    return replace(watched(), callbacks=[Rating()])


def restoring() -> Recipe:
    return replace(valley(), callbacks=[RestoreBestWeights()])


def untested() -> Recipe:
    return replace(restoring(), test=None)


def monitored() -> Recipe:
    """Two groups of parameters, the second of twice the rate."""
    recipe, monitors = valley(), [LearningRateMonitor(), LearningRateMonitor("epoch")]
    recipe.model.unused = nn.Parameter(torch.zeros(3))
    recipe.model.seen = [[monitor.steps, monitor.lrs] for monitor in monitors]

    def optimizer(parameters: Any, lr: float) -> torch.optim.Optimizer:
        groups: Any = [{"params": [one], "lr": n * lr} for n, one in enumerate(parameters, 1)]
        return torch.optim.SGD(groups, lr)

    return replace(recipe, optimizer=optimizer, callbacks=monitors)


def noting() -> Recipe:
    recipe, noting = valley(), Noting()
    recipe.model.seen = noting.seen
    # As on one rank only.
    return replace(recipe, callbacks=[Noting(), noting] if hvd.rank() else [])


def stopping() -> Recipe:
    return replace(valley(), callbacks=[Stopping()])


def failing() -> Recipe:
    return replace(valley(), callbacks=[Failing()])


def uncalled() -> Recipe:
    return replace(valley(), callbacks=[print])
