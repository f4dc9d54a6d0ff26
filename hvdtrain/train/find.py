"""Finders of a learning rate and of a batch size, from steps that leave nothing behind."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import numpy as np

from hvdtrain.collective import collective
from hvdtrain.core.objects import broadcast_object, vote
from hvdtrain.errors import NotFiniteError, TrainingError
from hvdtrain.topology import format_ranks
from hvdtrain.train.config_file import counted
from hvdtrain.train.loop.gather import on_this_rank
from hvdtrain.train.loop.heartbeat import StopSignals
from hvdtrain.train.loop.protocol import TrainingLoop, TrainingState
from hvdtrain.train.loop.step_plan import StepPlan
from hvdtrain.train.metrics import Totals
from hvdtrain.train.options import BATCH_SIZE, TrainOptions
from hvdtrain.train.resume import RunState, StateLoader
from hvdtrain.train.setup import RecipeFactory, TrainingSetup, set_up

__all__ = ["FoundBatchSize", "FoundLr"]


@dataclass(frozen=True)
class FoundLr:
    """What find_lr has found, the same on all ranks.

    Attributes:
        lr: the learning rate for one rank, as `lr` takes it, to three digits.
        scaled_lr: what it is when scaled for the ranks of this job.
        rates, losses: of each step, for all ranks together; losses are means over their samples.
    """

    lr: float
    scaled_lr: float
    rates: Sequence[float]
    losses: Sequence[float]


@dataclass(frozen=True)
class FoundBatchSize:
    """What find_batch_size has found, the same on all ranks.

    Attributes:
        batch_size: samples per rank and backward pass, as `batch_size` takes it.
        samples_per_second: of all ranks, by batch size.
        limit: why there is no larger one.
    """

    batch_size: int
    samples_per_second: Mapping[int, float]
    limit: str


class NothingToResume(StateLoader):
    """Starts from the beginning, and has no directory."""

    def begin_run(self, epoch_samples: int, state: TrainingState) -> RunState:
        return RunState(Path())


# The weight of the past in a mean of losses, and how far above its least value, in initial losses,
# it has diverged.
_SMOOTHING, _DIVERGED = 0.9, 3.0
# The part of all steps over which a slope reaches to each side.
_REACH = 1 / 12


@collective
def run_range_test(
    options: TrainOptions, make_recipe: RecipeFactory | None, signals: StopSignals
) -> FoundLr:
    """Take steps with growing learning rates until the loss diverges."""
    setup = set_up(options, make_recipe, NothingToResume(options))
    plan, state, total = setup.step_plan, setup.loop.state, options.find_lr or 0
    read = state.snapshot()
    before = read()
    losses: list[float] = []
    try:
        for learned in _steps(plan, setup.loop, signals):
            losses.append(learned.loss / learned.samples)
            means = _smoothed(losses)
            if not means[-1] - min(means) <= _DIVERGED * abs(losses[0]) or len(losses) == total:
                break
    except NotFiniteError:  # on all ranks
        if not losses:
            raise
    finally:
        state.load(before)
    rates = [plan.lr(step) for step in range(len(losses))]
    steepest = _steepest(losses, max(1, int(total * _REACH)))
    if steepest is None:
        raise TrainingError(
            f"--find-lr {total}: the loss never fell in {counted(len(losses), 'step')} with rates "
            f"from {rates[0]:.3g} to {rates[-1]:.3g}: give another --lr to begin at a hundredth of"
        )
    # Only digits that the loss can tell.
    lr = float(f"{rates[steepest] * options.base_lr / plan.target_lr:.3g}")
    found = FoundLr(lr, replace(options, lr=lr).scaled_lr(plan.topology.size), rates, losses)
    _print(options, setup, _lr_text(options, found, plan.topology.size))
    return found


def _smoothed(losses: Sequence[float]) -> list[float]:
    """Return means that end with each loss, in which those before count less and less."""
    means, mean = [], 0.0
    for number, loss in enumerate(losses, 1):
        mean = _SMOOTHING * mean + (1 - _SMOOTHING) * loss
        means.append(mean / (1 - _SMOOTHING**number))
    return means


def _steepest(losses: Sequence[float], reach: int) -> int | None:
    """Return the step around which the loss falls fastest, before it is least; None if nowhere."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    if not finite:
        return None
    falling = finite[: int(np.argmin(_smoothed(finite))) + 1]
    # The slope of a straight line through this step and some before and after it.
    weights = np.arange(-reach, reach + 1)
    if len(falling) < len(weights):
        return None
    slopes = np.correlate(falling, weights, "valid")
    found = int(slopes.argmin())
    return found + reach if slopes[found] < 0 else None


def _lr_text(options: TrainOptions, found: FoundLr, size: int) -> str:
    scaled = f", {found.scaled_lr:.3g} by {options.lr_scaling} scaling to {counted(size, 'rank')}"
    return (
        f"--lr {found.lr:g}{scaled * (found.scaled_lr != found.lr)}: there the loss fell fastest, "
        f"of {counted(len(found.losses), 'step')} with rates from {found.rates[0]:.3g} to "
        f"{found.rates[-1]:.3g}"
    )


@collective
def _steps(
    plan: StepPlan, loop: TrainingLoop, signals: StopSignals, epoch: int = 0
) -> Iterator[Totals]:
    """Take steps, and yield the sums of each over all ranks."""
    for number in count():
        stopping = vote([signals.asked], "stop")[0]
        if stopping.any():
            rank = int(stopping.argmax())
            raise TrainingError(f"rank {rank} was asked to stop: nothing is found")
        later, step = divmod(number, plan.steps_per_epoch)
        with on_this_rank():
            done = step * plan.global_batch_size
            learned = loop.train(epoch + later, done, lambda: False)
        yield learned


# A larger batch is faster if it is by so much. Without a GPU so many in a row that are not are
# enough.
_FASTER, _ENOUGH = 1.05, 2


@collective
def run_batch_sizes(
    options: TrainOptions, make_recipe: RecipeFactory | None, signals: StopSignals
) -> FoundBatchSize:
    """Take steps with each batch size, twice the one before, until one does not fit or help."""
    size = first = options.batch_size or BATCH_SIZE
    # Nothing is learned, so that nothing diverges.
    tried = replace(options, lr=options.base_lr / 1000, lr_scaling="none")
    setup = set_up(tried, make_recipe, NothingToResume(options))
    loop, steps, topology = setup.loop, options.find_batch_size or 0, setup.world.topology
    on_gpu = any("cuda" in device for device in setup.devices)
    read = loop.state.snapshot()
    before = read()
    speeds: dict[int, float] = {}
    limit, fastest, slower = "", first, 0
    try:
        while not limit:
            plan = replace(setup.step_plan, options=replace(tried, batch_size=size))
            if size > first and plan.global_batch_size > plan.samples:
                limit = f"{size}: more than all {plan.samples} samples in a step"
                break
            loop.use_step_plan(plan)
            epoch = len(speeds) * (steps + 1)
            with on_this_rank():
                fits = loop.fits(epoch)
            lacking = np.flatnonzero(vote([not fits], "memory")[0]).tolist()
            if lacking:
                limit = f"{size}: does not fit into the memory of {format_ranks(lacking)}"
                break
            speeds[size] = _speed(plan, loop, signals, epoch, steps)
            if speeds[size] > speeds[fastest] * _FASTER:
                fastest, slower = size, 0
            elif size > first and not on_gpu:
                slower += 1
            if slower == _ENOUGH:
                limit = "larger ones are no faster"
            size *= 2
    finally:
        loop.state.load(before)
    if not speeds:
        raise TrainingError(f"--batch-size {limit}: give a smaller one")
    found = FoundBatchSize(max(speeds) if on_gpu else fastest, speeds, limit)
    _print(options, setup, _size_text(options, found, first, topology.size))
    return found


@collective
def _speed(
    plan: StepPlan, loop: TrainingLoop, signals: StopSignals, epoch: int, steps: int
) -> float:
    """Return samples per second of all ranks, as rank 0 has measured them."""
    next(_steps(plan, loop, signals, epoch))  # which allocates, and compiles
    began, samples, left = time.perf_counter(), 0, steps

    def go_on() -> bool:
        nonlocal left
        left -= 1
        return left > 0

    while left:  # in as few calls as there are epochs: each takes Keras a while
        epoch += 1
        with on_this_rank():
            samples += loop.train(epoch, 0, go_on).samples
    speed: float = broadcast_object(samples / (time.perf_counter() - began), name="speed")
    return speed


def _size_text(options: TrainOptions, found: FoundBatchSize, first: int, ranks: int) -> str:
    chosen = replace(options, batch_size=found.batch_size)
    times = found.batch_size // first
    others = ", ".join(f"{size}: {speed:.0f}" for size, speed in found.samples_per_second.items())
    rate = f"--lr stays {options.base_lr:g}"
    if options.scaling(times) != 1:
        rate = (
            f"for {times} times the samples of {first}, {options.lr_scaling} scaling takes "
            f"--lr {options.base_lr * options.scaling(times):.3g} for {options.base_lr:g}"
        )
    return (
        f"--batch-size {found.batch_size}, {counted(chosen.samples_per_step(ranks), 'sample')} of "
        f"all ranks per step: {rate}; samples/s: {others}; {found.limit}"
    )


def _print(options: TrainOptions, setup: TrainingSetup, line: str) -> None:
    if setup.world.topology.rank == 0 and not options.quiet:
        print(line, flush=True)
