"""Losses that small models reach with each exchange, after equal samples and after equal time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from random import Random

import torch
from torch import Tensor

import hvdtrain.torch as hvd
from hvdtrain_bench.analysis.judge import AVERAGE
from hvdtrain_bench.cases.peers import Peers
from hvdtrain_bench.exchanges.tasks import TASKS, LossTask, Samples
from hvdtrain_bench.harness.ranks import Ranks
from hvdtrain_bench.harness.results import Case, PeerFacts, Result
from hvdtrain_bench.harness.settings import Settings
from hvdtrain_bench.harness.turns import facts

# Points of a curve: steps, seconds of training, loss of the test samples.
Curve = list[tuple[int, float, float]]


def measure_losses(
    ranks: Ranks, peers: Peers, settings: Settings, say: Callable[[str], None]
) -> Result:
    """Train small models with every exchange, once for each seed, in turns (collective)."""
    found: list[PeerFacts] = []
    cases = []
    names = [AVERAGE, *settings.exchanges]
    for key in settings.tasks:
        task = TASKS[key]
        train, test = task.data()
        curves: dict[str, list[Curve]] = {name: [] for name in names}
        for seed in range(settings.repeats):
            say(f"{task.title}, seed {seed}")
            for name in Random(seed).sample(names, len(names)):
                run = _Training(ranks, task, train, name, seed, settings)
                curves[name].append(run.curve(test))
        found = [facts(ranks, "hvdtrain", peers.library)]
        losses = {name: [curve[-1][-1] for curve in of] for name, of in curves.items()}
        about = {"task": key, "title": task.title, "curves": curves}
        cases.append(Case(task.title, about, "loss", losses))
    return Result("exchange-loss", ranks.size, peers.nodes, found, {}, cases)


class _Training:
    """A model that all ranks train with one exchange."""

    def __init__(
        self,
        ranks: Ranks,
        task: LossTask,
        train: Samples,
        exchange: str,
        seed: int,
        settings: Settings,
    ) -> None:
        self._ranks, self._task, self._settings = ranks, task, settings
        torch.manual_seed(seed)
        self._module = task.build()
        self._optimizer = hvd.DistributedOptimizer(
            task.optimizer(self._module), self._module.named_parameters(), exchange=exchange
        )
        self._optimizer.sample_weight = float(task.batch)
        torch.manual_seed(seed * ranks.size + ranks.rank)  # of dropout
        self._batches: Iterator[tuple[Tensor, Tensor]] = train.batches(ranks.rank, ranks.size, seed)

    def curve(self, test: Samples) -> Curve:
        """Train, and return the losses of the test samples on the way (collective)."""
        points: Curve = [(0, 0.0, self._loss(test))]
        seconds, each = 0.0, self._settings.steps_per_turn
        for number in range(self._settings.points):
            self._ranks.meet()
            began = time.perf_counter()
            for step in range(number * each, (number + 1) * each):
                self._set_rate(step)
                self._step()
            self._optimizer.flush()
            seconds += self._ranks.largest(time.perf_counter() - began)
            points.append(((number + 1) * each, seconds, self._loss(test)))
        return points

    def _set_rate(self, step: int) -> None:
        factor = self._task.factor
        if factor is not None:
            steps = self._settings.points * self._settings.steps_per_turn
            for group in self._optimizer.param_groups:
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor(step, steps)

    def _step(self) -> None:
        inputs, targets = next(self._batches)
        self._optimizer.zero_grad()
        self._task.loss(self._module(inputs), targets).backward()
        self._optimizer.step()

    def _loss(self, test: Samples) -> float:
        """Return the mean loss of the test samples; rank 0 computes it (collective)."""
        own = 0.0
        if self._ranks.rank == 0:
            self._module.eval()
            with torch.no_grad():
                own = float(self._task.loss(self._module(test.inputs), test.targets))
            self._module.train()
        return self._ranks.of_root(own)
