"""The overhead of the built-in loop over a handwritten one with hvdtrain.torch."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
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
from hvdtrain.train import Callback, CallbackState, Recipe, fit
from hvdtrain.train.metrics import Accuracy
from hvdtrain.train.recipes.torch_recipes import digits, resnet
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


_TASKS = {
    "digits": _Task("digits, 0.04 M", lambda: digits().model, (1, 8, 8), batch=32),
    "mlp": _Task("MLP, 2.9 M", small_mlp, (784,), batch=32),
    "resnet": _Task(
        "ResNet-14, 0.2 M",
        lambda: resnet(_CLASSES, width=16, stages=3, blocks=2),
        (3, 32, 32),
        batch=8,
    ),
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


class _Turns(Callback):
    """Runs the other loops before each epoch of the built-in loop, and times all of them."""

    def __init__(self, ranks: Ranks, contenders: dict[str, _ByHand]) -> None:
        self._ranks, self._contenders = ranks, contenders
        self.seconds: dict[str, list[float]] = {n: [] for n in (*contenders, BUILT_IN)}
        self._began = 0.0

    def on_epoch_begin(self, state: CallbackState) -> None:
        if state.epoch > 1:
            self._note(BUILT_IN)
        if state.epoch == 2:
            for name, loop in self._contenders.items():
                _compare(name, loop.model.state_dict(), state.model.state_dict())
        before = state.epoch - 1
        for name in Random(before).sample(sorted(self._contenders), len(self._contenders)):
            self._begin()
            self._contenders[name].epoch(before)
            self._note(name)
        self._begin()

    def _begin(self) -> None:
        self._ranks.meet()
        self._began = time.perf_counter()

    def _note(self, name: str) -> None:
        lasted = time.perf_counter() - self._began
        self.seconds[name].append(self._ranks.largest(lasted) / _STEPS)


def _case(ranks: Ranks, task: _Task, repeats: int, folder: Path) -> dict[str, list[float]]:
    data = task.samples(ranks.size)
    turns = _Turns(ranks, {name: _ByHand(task, data, ranks.size) for name in (BY_HAND, _AGAIN)})

    def recipe() -> Recipe:
        torch.manual_seed(0)
        return Recipe(task.build(), data, F.cross_entropy, metrics={"accuracy": Accuracy()})

    # The first epoch warms up, and the last one is not timed, as no other begins after it.
    fit(
        recipe,
        callbacks=[turns],
        epochs=repeats + 2,
        batch_size=task.batch,
        lr=_LR,
        lr_scaling="none",
        warmup_epochs=0,
        momentum=_MOMENTUM,
        checkpoint_every=f"{repeats + 3} epochs",
        out=folder,
        device="cpu",
        quiet=True,
    )
    return {name: times[1 : repeats + 1] for name, times in turns.seconds.items()}


def _compare(
    name: str, weights: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]
) -> None:
    differ = sum(float((weights[key] - theirs[key]).abs().sum()) for key in weights)
    total = sum(float(tensor.abs().sum()) for tensor in theirs.values())
    if not differ < _AGREEMENT * total:
        raise WrongResultError(
            f"weights {name} differ from those of hvdtrain train by {differ / total:.2g} of their "
            "size: they do not train the same model"
        )
