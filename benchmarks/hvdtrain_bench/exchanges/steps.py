"""Training steps with each exchange, in slices between those of the others, and the bytes sent."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import torch
from torch import nn
from torch.optim import Optimizer

import hvdtrain.torch as hvd
from hvdtrain_bench.analysis.judge import AVERAGE, AVERAGE_AGAIN, NO_COMMUNICATION
from hvdtrain_bench.cases.models import MODELS, BenchModel
from hvdtrain_bench.cases.peers import Peers
from hvdtrain_bench.cases.sums import WrongResultError
from hvdtrain_bench.cases.trainer import Trainer, bare, first_weights
from hvdtrain_bench.harness.ranks import Ranks
from hvdtrain_bench.harness.settings import Settings, turn_steps
from hvdtrain_bench.harness.turns import Bench

_FIRST_STEPS = 2


@dataclass(frozen=True)
class Stepper:
    """Something whose steps are timed.

    Attributes:
        steps: number of steps of a turn.
        prepare: called once, before the first step.
        check: raises WrongResultError unless the ranks agree.
    """

    name: str
    steps: int
    prepare: Callable[[], None]
    step: Callable[[], None]
    check: Callable[[], None]


def take_slices(
    ranks: Ranks,
    steppers: Sequence[Stepper],
    repeats: int,
    slice_steps: int,
    run: Callable[[str, int, Callable[[], None]], None],
) -> dict[str, list[float]]:
    """Return the mean time of a step in each turn (collective).

    In each repeat every contender takes one turn, in slices of a few steps. The slices of all
    contenders alternate at random, so that turns of very different lengths see the same machine.

    Args:
        run: takes a number of steps of a contender; called with its name, that number, and step.
    """
    for stepper in steppers:
        stepper.prepare()
        for _ in range(_FIRST_STEPS):
            stepper.step()
        stepper.check()  # also begins a new period
    found: dict[str, list[float]] = {stepper.name: [] for stepper in steppers}
    for repeat in range(repeats):
        seconds = dict.fromkeys(found, 0.0)
        for stepper, steps in _slices(steppers, slice_steps, Random(repeat)):
            ranks.rest()
            ranks.meet()
            began = time.perf_counter()
            run(stepper.name, steps, stepper.step)
            seconds[stepper.name] += ranks.largest(time.perf_counter() - began)
        for stepper in steppers:
            stepper.check()
            found[stepper.name].append(seconds[stepper.name] / stepper.steps)
    return found


def _slices(
    steppers: Sequence[Stepper], slice_steps: int, random: Random
) -> list[tuple[Stepper, int]]:
    """Return contenders with numbers of steps, in random order."""
    slices = [
        (stepper, min(slice_steps, stepper.steps - start))
        for stepper in steppers
        for start in range(0, stepper.steps, slice_steps)
    ]
    random.shuffle(slices)
    return slices


_COUNTERS = Path("/proc/net/dev")


def measure_exchanges(bench: Bench, peers: Peers) -> None:
    """Time steps of each model with every exchange, and count what they send (collective)."""
    ranks, settings = bench.ranks, bench.settings
    for key in settings.models:
        model = MODELS[key]
        bench.say(model.title)
        meter = _Meter()
        steppers = _steppers(ranks, model, settings)
        seconds = take_slices(ranks, steppers, settings.repeats, settings.steps_per_turn, meter.run)
        bench.note(NO_COMMUNICATION, f"torch {torch.__version__}")
        bench.note("hvdtrain", peers.library)
        sent = {name: max(ranks.all_of(meter.per_step(name))) for name in seconds}
        steps = {stepper.name: stepper.steps for stepper in steppers}
        bench.add(
            model.title,
            seconds,
            AVERAGE,
            AVERAGE_AGAIN,
            model=key,
            title=model.title,
            steps=steps,
            sent_bytes=sent,
        )


class _Meter:
    """Counts the bytes that this host sends during the steps of each contender."""

    def __init__(self) -> None:
        self._sent: dict[str, int] = {}
        self._steps: dict[str, int] = {}

    def run(self, name: str, steps: int, step: Callable[[], None]) -> None:
        """Take steps of a contender, and count them and what they send."""
        before = _sent_bytes()
        for _ in range(steps):
            step()
        self._sent[name] = self._sent.get(name, 0) + _sent_bytes() - before
        self._steps[name] = self._steps.get(name, 0) + steps

    def per_step(self, name: str) -> float:
        """Return the mean number of bytes of a step of a contender."""
        return self._sent[name] / self._steps[name]


def _sent_bytes() -> int:
    """Return the bytes that the network cards of this host have sent, without the loopback."""
    lines = _COUNTERS.read_text(encoding="ascii").splitlines()[2:]
    cards = dict(line.split(":", 1) for line in lines)
    return sum(int(counts.split()[8]) for name, counts in cards.items() if name.strip() != "lo")


def _steppers(ranks: Ranks, model: BenchModel, settings: Settings) -> list[Stepper]:
    weights = first_weights(model)
    batch = model.make_batch(model.batch, seed=ranks.rank)
    texts = {AVERAGE: "average", AVERAGE_AGAIN: "average"} | {t: t for t in settings.exchanges}
    steps = {name: turn_steps(text, settings.steps_per_turn) for name, text in texts.items()}
    plain = Trainer(model, weights, batch, bare, ranks.rank)
    # As long as the longest turn, which may have to be compared with it within a few percent.
    longest = max(steps.values())
    found = [Stepper(NO_COMMUNICATION, longest, plain.restart, plain.step, lambda: None)]
    for name, text in texts.items():
        wrap = partial(_with_exchange, text)
        trainer = Trainer(model, weights, batch, wrap, ranks.rank)
        check = partial(_check, name, ranks, trainer)
        found.append(Stepper(name, steps[name], trainer.restart, trainer.step, check))
    return found


def _with_exchange(text: str, module: nn.Module) -> tuple[nn.Module, Optimizer]:
    optimizer = bare(module)[1]
    named = module.named_parameters()
    return module, hvd.DistributedOptimizer(optimizer, named, exchange=text)


def _check(name: str, ranks: Ranks, trainer: Trainer) -> None:
    """Compare the weights of the ranks (collective)."""
    assert isinstance(trainer.optimizer, hvd.DistributedOptimizer)
    trainer.optimizer.flush()
    moved = ranks.all_of(trainer.moved())
    if len(set(moved)) > 1 or not 0 < moved[0] < float("inf"):
        raise WrongResultError(f"{name}: the ranks moved their weights by {moved}")
