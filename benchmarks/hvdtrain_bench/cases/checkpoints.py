"""The cost of checkpoints: steps while one is written, and steps without one."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median

import torch

import hvdtrain.torch as hvd
from hvdtrain.train.checkpoint.saver import Saver
from hvdtrain.train.torch.state import TorchTrainingState
from hvdtrain_bench.analysis.judge import LONGEST, LONGEST_WITHOUT, MEAN, USUAL
from hvdtrain_bench.cases.models import MODELS
from hvdtrain_bench.cases.peers import PeerLibraries
from hvdtrain_bench.harness.ranks import Ranks
from hvdtrain_bench.harness.turns import Bench, in_turns

_FEWEST_STEPS = 8
_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-4),
}


def measure(bench: Bench, peers: PeerLibraries) -> None:
    """Time steps of models while rank 0 writes a checkpoint, and without one (collective)."""
    for key in bench.settings.models:
        for title in _OPTIMIZERS:
            name = f"{MODELS[key].title}, {title}"
            bench.say(name)
            with ExitStack() as stack:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                saver = stack.enter_context(Saver(folder, keep=1))
                _case(bench, _SavedTraining(bench.ranks, key, title, saver), name)
                bench.note("hvdtrain", peers.library)


class _SavedTraining:
    """A model that all ranks train, and rank 0 saves."""

    def __init__(self, ranks: Ranks, key: str, title: str, saver: Saver) -> None:
        self._ranks, self._saver, self._model = ranks, saver, MODELS[key]
        torch.manual_seed(1)
        self._module = self._model.build()
        self._batch = self._model.make_batch(self._model.batch, seed=ranks.rank)
        self._optimizer = hvd.DistributedOptimizer(
            _OPTIMIZERS[title](self._module.parameters()), self._module.named_parameters()
        )
        self._state = TorchTrainingState(self._module, self._optimizer)
        self.steps(_FEWEST_STEPS)
        if ranks.rank == 0:
            self._state.reserve()

    def steps(self, count: int) -> list[float]:
        """Take steps; return the seconds of each on the slowest rank."""
        return self._slowest([self._step() for _ in range(count)])

    def steps_of_a_checkpoint(self) -> list[float]:
        """Start a checkpoint and take steps until it is written; return the same as steps()."""
        times: list[float] = []
        began = time.perf_counter()
        if self._ranks.rank == 0:
            self._saver.save(0, 1, self._state, {"epoch": 0})
        while True:
            times.append(self._step(began))
            written = self._ranks.of_root(not self._saver.busy)
            if written and len(times) >= _FEWEST_STEPS:
                return self._slowest(times)
            began = time.perf_counter()

    def _step(self, began: float | None = None) -> float:
        began = time.perf_counter() if began is None else began
        inputs, targets = self._batch
        self._optimizer.zero_grad()
        self._model.loss(self._module(inputs), targets).backward()
        self._state.settle()
        self._optimizer.step()
        return time.perf_counter() - began

    def _slowest(self, times: list[float]) -> list[float]:
        return [max(of_ranks) for of_ranks in zip(*self._ranks.all_of(times), strict=True)]


def _case(bench: Bench, training: _SavedTraining, name: str) -> None:
    values: dict[str, list[float]] = {n: [] for n in (USUAL, LONGEST_WITHOUT, MEAN, LONGEST)}
    counts: list[int] = []
    count = len(training.steps_of_a_checkpoint())
    for _, saves in in_turns((False, True), bench.settings.repeats):
        if saves:
            written = training.steps_of_a_checkpoint()
            count = len(written)
            counts.append(count)
            values[MEAN].append(mean(written))
            values[LONGEST].append(max(written))
        else:
            without = training.steps(count)
            values[USUAL].append(median(without))
            values[LONGEST_WITHOUT].append(max(without))
    bench.add(name, values, USUAL, steps=counts)
