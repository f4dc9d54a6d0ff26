"""The cost of checkpoints: steps while one is written, and steps without one."""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import mean, median

from hvdtrain.train.checkpoints import Saver
from hvdtrain.train.torch.state import TorchTrainingState
from hvdtrain_bench.analysis.judge import LONGEST, LONGEST_WITHOUT, MEAN, USUAL
from hvdtrain_bench.cases.models import MODELS, Trainer, first_weights
from hvdtrain_bench.cases.peers import PeerLibraries
from hvdtrain_bench.cases.steps import with_hvdtrain
from hvdtrain_bench.harness.ranks import Ranks
from hvdtrain_bench.harness.turns import Bench, in_turns

_FEWEST_STEPS = 8
_TITLES = {"sgd": "SGD with momentum", "adam": "Adam"}


def measure(bench: Bench, peers: PeerLibraries) -> None:
    for key in bench.settings.models:
        for optimizer, title in _TITLES.items():
            name = f"{MODELS[key].title}, {title}"
            bench.say(name)
            with ExitStack() as stack:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                saver = stack.enter_context(Saver(folder, keep=1))
                _case(bench, _SavedTraining(bench.ranks, key, optimizer, saver), name)
                bench.note("hvdtrain", peers.library)


class _SavedTraining:
    def __init__(self, ranks: Ranks, key: str, optimizer: str, saver: Saver) -> None:
        self._ranks, self._saver, model = ranks, saver, MODELS[key]
        batch = model.make_batch(model.batch, seed=ranks.rank)
        wrap = partial(with_hvdtrain, kind=optimizer)
        self._trainer = Trainer(model, first_weights(model), batch, wrap, ranks.rank)
        self._trainer.restart()
        self._state = TorchTrainingState(self._trainer.module, self._trainer.optimizer)
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
        self._trainer.step(self._state.settle)
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
