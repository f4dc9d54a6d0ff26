"""The overhead of the built-in loop over a handwritten one with hvdtrain.torch."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import hvdtrain.torch as hvd
from hvdtrain.data.dataset import Samples
from hvdtrain.data.sampling import GlobalBatchSampler
from hvdtrain.train.callbacks import Callbacks
from hvdtrain.train.loop.heartbeat import Heartbeat, StopSignals
from hvdtrain.train.loop.snapshots import Triggers
from hvdtrain.train.metrics import Accuracy
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.recipe import Recipe
from hvdtrain.train.recipes.digits import recipe as digits
from hvdtrain.train.recipes.parts import resnet
from hvdtrain.train.resume import StateLoader
from hvdtrain.train.run import Run
from hvdtrain.train.run_log import RunLog
from hvdtrain.train.setup import TrainingSetup, set_up
from hvdtrain.train.terminal import Terminal
from hvdtrain.train.tracking.tracker import RunInfo
from hvdtrain.train.tracking.trackers import open_trackers
from hvdtrain_bench.analysis.judge import BUILT_IN, BY_HAND
from hvdtrain_bench.cases.checked import WrongResultError
from hvdtrain_bench.cases.models import small_mlp
from hvdtrain_bench.cases.peers import PeerLibraries
from hvdtrain_bench.harness.ranks import Ranks
from hvdtrain_bench.harness.turns import Bench

_AGAIN = "by hand again"
# Steps of an epoch; the built-in loop compares its ranks once in as many.
_STEPS = 100
_CLASSES = 10
# Relative difference after one epoch: rounding differs, and training amplifies it.
_AGREEMENT = 1e-2
_LR, _MOMENTUM = 0.01, 0.9


@dataclass(frozen=True)
class _Task:
    title: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: int

    def samples(self, ranks: int) -> Samples:
        rng = np.random.default_rng(1)
        count = _STEPS * self.batch * ranks
        inputs = rng.standard_normal((count, *self.shape), dtype=np.float32)
        return Samples(inputs, rng.integers(_CLASSES, size=count))


def _digits() -> nn.Module:
    model: nn.Module = digits().model
    return model


def _residual() -> nn.Module:
    return resnet(_CLASSES, width=16, stages=3, blocks=2)


_TASKS = {
    "digits": _Task("digits, 0.04 M", _digits, (1, 8, 8), batch=32),
    "mlp": _Task("MLP, 2.9 M", small_mlp, (784,), batch=32),
    "resnet": _Task("ResNet-14, 0.2 M", _residual, (3, 32, 32), batch=8),
}


def measure(bench: Bench, peers: PeerLibraries) -> None:
    ranks, settings = bench.ranks, bench.settings
    for task in map(_TASKS.__getitem__, settings.loops):
        name = f"{task.title}, {task.batch} samples per rank"
        bench.say(name)
        with tempfile.TemporaryDirectory() as folder:
            seconds = _case(ranks, task, settings.repeats, Path(ranks.of_root(folder)))
        bench.add(name, seconds, BY_HAND, _AGAIN)
    for name in (BY_HAND, _AGAIN, BUILT_IN):
        bench.note(name, peers.library)


class _ByHand:
    """A typical handwritten loop: it sums loss and accuracy, and returns both after an epoch."""

    def __init__(self, task: _Task, data: Samples, ranks: int) -> None:
        self._inputs, self._targets = map(torch.from_numpy, (data.inputs, data.labels))
        self._sampler = GlobalBatchSampler(len(data), task.batch * ranks)
        torch.manual_seed(0)
        self.model = task.build()
        optimizer = torch.optim.SGD(self.model.parameters(), lr=_LR, momentum=_MOMENTUM)
        self._optimizer = hvd.DistributedOptimizer(optimizer, self.model.named_parameters())
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)

    def epoch(self, number: int) -> torch.Tensor:
        """Train one epoch; return samples, loss and accuracy summed over all ranks, float64 [3]."""
        self._sampler.set_epoch(number)
        seen, loss_sum, right = 0, 0.0, 0
        self.model.train()
        for indices in self._sampler:
            inputs, targets = self._inputs[indices], self._targets[indices]
            self._optimizer.zero_grad()
            outputs = self.model(inputs)
            loss = F.cross_entropy(outputs, targets)
            loss.backward()
            self._optimizer.step()
            seen += len(targets)
            loss_sum += loss.item() * len(targets)
            right += int((outputs.argmax(dim=1) == targets).sum())
        sums = torch.tensor([seen, loss_sum, right], dtype=torch.float64)
        return hvd.allreduce(sums, op=hvd.Sum, name="sums")


class _Turns(Terminal):
    """A terminal for the built-in loop that runs the other loops before each of its epochs."""

    def __init__(
        self, ranks: Ranks, contenders: dict[str, _ByHand], check: Callable[[], None]
    ) -> None:
        super().__init__(prints=False, bar=False)
        self._ranks, self._contenders, self._check = ranks, contenders, check
        self.seconds: dict[str, list[float]] = {n: [] for n in (*contenders, BUILT_IN)}
        self._epoch = 0
        self._began = 0.0

    def begin(self, title: str, steps: int, done: int = 0, later: int = 0) -> None:
        if self._epoch:
            self._note(BUILT_IN)
        if self._epoch == 1:
            self._check()
        for name in Random(self._epoch).sample(sorted(self._contenders), len(self._contenders)):
            self._begin()
            self._contenders[name].epoch(self._epoch)
            self._note(name)
        self._epoch += 1
        self._begin()

    def _begin(self) -> None:
        self._ranks.meet()
        self._began = time.perf_counter()

    def _note(self, name: str) -> None:
        lasted = time.perf_counter() - self._began
        self.seconds[name].append(self._ranks.largest(lasted) / _STEPS)


def _case(ranks: Ranks, task: _Task, repeats: int, folder: Path) -> dict[str, list[float]]:
    data = task.samples(ranks.size)
    by_hand = {name: _ByHand(task, data, ranks.size) for name in (BY_HAND, _AGAIN)}
    # The first epoch warms up, and the last one is not timed, as no other begins after it.
    options = TrainOptions(
        epochs=repeats + 2,
        batch_size=task.batch,
        lr=_LR,
        lr_scaling="none",
        warmup_epochs=0,
        momentum=_MOMENTUM,
        checkpoint_every=f"{repeats + 3} epochs",
        out=folder,
        device="cpu",
    )
    built = set_up(options, lambda: _recipe(task, data), StateLoader(options))

    def check() -> None:
        for name, loop in by_hand.items():
            _compare(name, loop.model, built)

    turns = _Turns(ranks, by_hand, check)
    with StopSignals() as signals:
        heartbeat = Heartbeat(built.world, signals, Triggers.of(options).timers)
        run_log = _run_log(options, built, folder) if ranks.rank == 0 else None
        Run(options, built, turns, heartbeat, run_log, Callbacks([], verbose=False)).run()
        if run_log is not None:
            run_log.close()
    return {name: times[1 : repeats + 1] for name, times in turns.seconds.items()}


def _recipe(task: _Task, data: Samples) -> Recipe:
    torch.manual_seed(0)
    metrics = {"accuracy": Accuracy()}
    return Recipe(task.build(), data, F.cross_entropy, metrics=metrics)


def _run_log(options: TrainOptions, built: TrainingSetup, folder: Path) -> RunLog:
    return RunLog(options, built, open_trackers("", RunInfo("loop", folder, {}, None)))


def _compare(name: str, model: nn.Module, built: TrainingSetup) -> None:
    theirs = built.loop.state.weights()
    differ = total = 0.0
    for key, tensor in model.state_dict().items():
        differ += float(np.abs(tensor.numpy() - theirs[key]).sum())
        total += float(np.abs(theirs[key]).sum())
    if not differ < _AGREEMENT * total:
        raise WrongResultError(
            f"weights {name} differ from those of hvdtrain train by {differ / total:.2g} of their "
            "size: they do not train the same model"
        )
