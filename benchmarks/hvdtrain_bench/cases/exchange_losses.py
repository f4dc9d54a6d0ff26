"""The losses that exchanges reach in small tasks with real data, by samples and by time."""

from __future__ import annotations

import math
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import hvdtrain.torch as hvd
from hvdtrain.data.dataset import Samples as ImageSamples
from hvdtrain.data.digits import load_digits
from hvdtrain.train.recipes.torch_recipes import Transformer
from hvdtrain_bench.analysis.judge import AVERAGE
from hvdtrain_bench.cases.models import MODELS
from hvdtrain_bench.cases.peers import PeerLibraries
from hvdtrain_bench.harness.ranks import Ranks
from hvdtrain_bench.harness.results import MeasurementSettings
from hvdtrain_bench.harness.turns import Bench, in_turns

_CONTEXT, _TEXT_CHARACTERS, _TEST_WINDOWS = 32, 1 << 20, 512
_ASCII = 128
_BATCH = 32


@dataclass(frozen=True)
class TensorSamples:
    inputs: Tensor  # [n, ...]
    targets: Tensor  # int64 [n, ...]

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
    title: str
    data: Callable[[], tuple[TensorSamples, TensorSamples]]
    build: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], Optimizer]
    # Returns the factor of the learning rate in a step, given its number from 0 and the number of
    # all steps; None if the rate is constant.
    factor: Callable[[int, int], float] | None = None


def _digits(size: int) -> tuple[TensorSamples, TensorSamples]:
    """Return scikit-learn's digits, float32 [n, 1, size, size]."""
    found = load_digits()

    def samples(given: ImageSamples) -> TensorSamples:
        inputs = F.interpolate(torch.from_numpy(given.inputs), (size, size))
        return TensorSamples(inputs, torch.from_numpy(given.labels))

    return samples(found.train), samples(found.test)


def _text() -> tuple[TensorSamples, TensorSamples]:
    """Return windows of Python's own source code, int64 [n, 32]; targets are one further."""
    folder = Path(sysconfig.get_path("stdlib"))
    sources = (path.read_bytes() for path in sorted(folder.glob("*.py")))
    text = np.frombuffer(b"".join(sources)[:_TEXT_CHARACTERS], np.uint8)
    tokens = torch.from_numpy(np.minimum(text, _ASCII - 1).astype(np.int64))
    count = (len(tokens) - 1) // _CONTEXT
    inputs = tokens[: count * _CONTEXT].reshape(count, _CONTEXT)
    targets = tokens[1 : count * _CONTEXT + 1].reshape(count, _CONTEXT)
    first = count - _TEST_WINDOWS
    return TensorSamples(inputs[:first], targets[:first]), TensorSamples(
        inputs[first:], targets[first:]
    )


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


def _cosine(step: int, steps: int) -> float:
    """Rise over the first twentieth of the steps, then follow half a period of a cosine to 0."""
    rising = steps // 20
    if step < rising:
        return (step + 1) / rising
    return (1 + math.cos(math.pi * (step - rising) / (steps - rising))) / 2


_TEXT = LossTask(
    "character transformer",
    _text,
    lambda: Transformer(_ASCII, _CONTEXT, 64, 2, 4),
    lambda module: AdamW(module.parameters(), lr=1e-3),
)
_DECAY = "character transformer whose learning rate decays"
TASKS = {
    "digits": LossTask("MLP on digits", lambda: _digits(8), _digits_network, _sgd),
    "text": _TEXT,
    "text-decay": replace(_TEXT, title=_DECAY, factor=_cosine),
    "mnist-cnn": LossTask(
        "MNIST CNN on digits", lambda: _digits(28), MODELS["mnist-cnn"].build, _sgd
    ),
}


# Points of a curve: steps, seconds of training, loss of the test samples.
Curve = list[tuple[int, float, float]]


def measure(bench: Bench, peers: PeerLibraries) -> None:
    ranks, settings = bench.ranks, bench.settings
    names = [AVERAGE, *settings.exchanges]
    for key in settings.tasks:
        task = TASKS[key]
        train, test = task.data()
        curves: dict[str, list[Curve]] = {name: [] for name in names}
        for seed, name in in_turns(names, settings.repeats):
            bench.say(f"{task.title}, seed {seed}, {name}")
            run = _Training(ranks, task, train, name, seed, settings)
            curves[name].append(run.curve(test))
        bench.note("hvdtrain", peers.library)
        losses = {name: [curve[-1][-1] for curve in of] for name, of in curves.items()}
        bench.add(task.title, losses, unit="loss", task=key, title=task.title, curves=curves)


class _Training:
    def __init__(
        self,
        ranks: Ranks,
        task: LossTask,
        train: TensorSamples,
        exchange: str,
        seed: int,
        settings: MeasurementSettings,
    ) -> None:
        self._ranks, self._task, self._settings = ranks, task, settings
        torch.manual_seed(seed)
        self._module = task.build()
        self._optimizer = hvd.DistributedOptimizer(
            task.optimizer(self._module), self._module.named_parameters(), exchange=exchange
        )
        self._optimizer.sample_weight = float(_BATCH)
        torch.manual_seed(seed * ranks.size + ranks.rank)  # of dropout
        self._batches: Iterator[tuple[Tensor, Tensor]] = train.batches(ranks.rank, ranks.size, seed)

    def curve(self, test: TensorSamples) -> Curve:
        points: Curve = [(0, 0.0, self._loss(test))]
        seconds, each, factor = 0.0, self._settings.steps_per_turn, self._task.factor
        for number in range(self._settings.points):
            self._ranks.meet()
            began = time.perf_counter()
            for step in range(number * each, (number + 1) * each):
                if factor is not None:
                    for group in self._optimizer.param_groups:
                        rate = group.setdefault("initial_lr", group["lr"])
                        group["lr"] = rate * factor(step, self._settings.points * each)
                inputs, targets = next(self._batches)
                self._optimizer.zero_grad()
                F.cross_entropy(self._module(inputs), targets).backward()
                self._optimizer.step()
            self._optimizer.flush()
            seconds += self._ranks.largest(time.perf_counter() - began)
            points.append(((number + 1) * each, seconds, self._loss(test)))
        return points

    def _loss(self, test: TensorSamples) -> float:
        """Return the mean loss of the test samples; rank 0 computes it (collective)."""
        own = 0.0
        if self._ranks.rank == 0:
            self._module.eval()
            with torch.no_grad():
                own = float(F.cross_entropy(self._module(test.inputs), test.targets))
            self._module.train()
        return self._ranks.of_root(own)
