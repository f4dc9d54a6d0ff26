"""The loop that all strategies for torch share, and what it measures."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from hvdtrain.data.sampling import Indices, epoch_permutation
from hvdtrain.train.loop.step_plan import Microbatch
from hvdtrain.train.metrics import Accuracy
from hvdtrain.train.torch.sources import Step
from hvdtrain_compare.meters import StepMeter
from hvdtrain_compare.protocol import Place, RankResult, Task
from hvdtrain_compare.torch.problem import Problem, make_problem
from hvdtrain_compare.torch.trainer import Trainer

Wrap = Callable[[Problem], Trainer]
_EVALUATED_TOGETHER = 128


def train_torch(task: Task, place: Place, wrap: Wrap) -> RankResult:
    """Train the recipe under a strategy, evaluate it, and return what was measured."""
    problem = make_problem(task, place)
    trainer = wrap(problem)
    steps = problem.plan.steps_per_epoch * problem.options.epochs
    meter = StepMeter(min(task.check_steps, steps))
    for epoch in range(problem.options.epochs):
        _train_epoch(trainer, epoch, meter)
    meter.stop()
    trainer.settle()
    final = trainer.weights()
    evaluated, scores = _evaluate(trainer)
    return meter.result(
        task,
        place,
        lambda: final,
        library=trainer.library,
        samples=problem.plan.samples,
        test_samples=0 if problem.recipe.test is None else len(problem.recipe.test),
        threads=torch.get_num_threads(),
        evaluated=evaluated,
        scores=scores,
        notes=trainer.notes,
    )


def _train_epoch(trainer: Trainer, epoch: int, meter: StepMeter) -> None:
    problem = trainer.problem
    order = epoch_permutation(problem.plan.samples, problem.options.seed, epoch)
    shares = trainer.division.train_shares(order)
    steps = [
        Step(number, own, [Microbatch(problem.place.rank, own)])
        for number, own in enumerate(shares, len(meter.seconds))
    ]
    trainer.model.train()
    meter.begin()
    for step, (batch,) in problem.train_source().batches(steps, epoch):
        trainer.set_rate(problem.plan.lr(step.number))
        trainer.step(batch.inputs, batch.targets, len(step.samples))
        meter.end_step(trainer.weights)
    meter.end_epoch(shares)


def _evaluate(trainer: Trainer) -> tuple[Indices, Mapping[str, tuple[float, float]]]:
    """Evaluate this process's test samples, and return them and the sums of their scores."""
    problem = trainer.problem
    recipe = problem.recipe
    if recipe.test is None:
        return np.zeros(0, np.int64), {}
    own = trainer.division.test_share(len(recipe.test))
    starts = range(0, len(own), _EVALUATED_TOGETHER)
    parts = [own[start : start + _EVALUATED_TOGETHER] for start in starts]
    steps = [Step(number, part, [Microbatch(0, part)]) for number, part in enumerate(parts)]
    accuracies = {name: m for name, m in recipe.metrics.items() if isinstance(m, Accuracy)}
    sums = {name: np.zeros(2) for name in ("loss", *accuracies)}
    trainer.model.eval()
    with torch.no_grad():
        for step, (batch,) in problem.test_source().batches(steps, 0):
            outputs, samples = trainer.outputs(batch.inputs), len(step.samples)
            loss = float(recipe.loss(outputs, batch.targets))
            sums["loss"] += (loss * samples, samples)
            for name, metric in accuracies.items():
                sums[name] += metric.counts(outputs, batch.targets).numpy()
    return own, {name: (float(total), float(count)) for name, (total, count) in sums.items()}
