"""Training with torch that all strategies share: the problem, its division, the loop."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from hvdtrain.collective import collective
from hvdtrain.data.dataset import is_stream
from hvdtrain.data.sampling import Indices, epoch_permutation, seed_generators
from hvdtrain.devices import thread_share
from hvdtrain.errors import UsageError
from hvdtrain.topology import Topology
from hvdtrain.train.loop.step_plan import Microbatch, StepPlan
from hvdtrain.train.metrics import Accuracy
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.recipe import Recipe
from hvdtrain.train.recipe_loader import load_recipe
from hvdtrain.train.torch.device import limit_threads, move_to
from hvdtrain.train.torch.evaluation import call_model
from hvdtrain.train.torch.sources import Source, Step, make_source
from hvdtrain.train.torch.update import plain_optimizer
from hvdtrain_bench.compare.division import (
    EVALUATED_TOGETHER,
    Division,
    ExactDivision,
    PaddedDivision,
)
from hvdtrain_bench.compare.meters import StepMeter
from hvdtrain_bench.compare.protocol import ContenderTask, ProcessPlace, RankResult, Weights


@dataclass(frozen=True)
class TorchProblem:
    """What is trained, the same for every strategy."""

    place: ProcessPlace
    ranks: int
    variant: str
    recipe: Recipe
    plan: StepPlan
    options: TrainOptions

    @property
    def model(self) -> torch.nn.Module:
        """The model."""
        model: torch.nn.Module = self.recipe.model
        return model

    @property
    def batch(self) -> int:
        """Samples of all ranks per step."""
        return self.plan.global_batch_size

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of the recipe or of the options for a model."""
        return plain_optimizer(self.recipe, model, self.options)

    def train_source(self) -> Source:
        """Return what reads the training samples."""
        return self._source(self.recipe.train, self.recipe.augment)

    def test_source(self) -> Source:
        """Return what reads the test samples."""
        return self._source(self.recipe.test, None)

    def _source(self, data: Any, augment: Any) -> Source:
        move = partial(move_to, device=torch.device("cpu"), dtype=_dtype(self.options))
        return make_source(data, move, self.options.seed, 0, augment, self.recipe.collate)


def make_problem(task: ContenderTask, place: ProcessPlace) -> TorchProblem:
    """Build the recipe on the CPU, with the same seed on every rank."""
    options = task.options
    host = socket.gethostname()
    here = Topology.from_nodes(place.rank, [0] * place.size, [host] * place.size)
    threads = thread_share(here)
    if threads is not None:
        torch.set_num_threads(threads)
    make_recipe = load_recipe(options)
    seed_generators(options.seed)
    recipe = make_recipe()
    _require_comparable(options.recipe, recipe)
    if recipe.most_threads is not None:
        limit_threads(recipe.most_threads)
    recipe.model.to("cpu", _dtype(options))
    samples = recipe.samples_per_epoch or len(recipe.train)
    plan = StepPlan(options, here, samples, ranks=task.ranks)
    if plan.global_batch_size % task.ranks:
        raise UsageError(
            f"a batch of {plan.global_batch_size} samples cannot be divided by {task.ranks} ranks, "
            "which DistributedSampler needs: give a multiple"
        )
    return TorchProblem(place, task.ranks, task.variant, recipe, plan, options)


def _require_comparable(name: str, recipe: Recipe) -> None:
    if not isinstance(recipe.model, torch.nn.Module):
        raise UsageError(
            f"the model of {name} is a {type(recipe.model).__name__}, not a torch.nn.Module"
        )
    if is_stream(recipe.train):
        raise UsageError(
            f"the training data of {name} is a stream, which DistributedSampler cannot divide: "
            "compare recipes whose data has len() and [index]"
        )


def _dtype(options: TrainOptions) -> torch.dtype:
    found: torch.dtype = getattr(torch, options.dtype)
    return found


class TorchTrainer:
    """One process that trains as a plain loop does."""

    def __init__(
        self,
        problem: TorchProblem,
        model: torch.nn.Module | None = None,
        optimizer: Any = None,
        division: Division | None = None,
        library: str = "",
    ) -> None:
        self.problem = problem
        self.model = problem.model if model is None else model
        self.optimizer: Any = optimizer or problem.optimizer(self.model)
        self.division = division or ExactDivision(problem.place, problem.batch)
        self.library = library or f"torch {torch.__version__}"
        self.notes: list[str] = []
        # Groups with learning rates of their own keep them in proportion to the first group's.
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self._ratios = [rate / rates[0] if rates[0] else 1.0 for rate in rates]

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of the next step."""
        for group, ratio in zip(self.optimizer.param_groups, self._ratios, strict=True):
            group["lr"] = rate * ratio

    def step(self, inputs: Any, targets: Any, samples: int) -> None:
        """Train one step, together with the other processes."""
        self.optimizer.zero_grad()
        self.backward(self.loss(inputs, targets))
        self.optimizer.step()

    def loss(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Return the mean loss of a batch."""
        loss: torch.Tensor = self.problem.recipe.loss(self.outputs(inputs), targets)
        return loss

    def outputs(self, inputs: Any) -> Any:
        """Return the outputs of the model."""
        return call_model(self.model, inputs)

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of a loss."""
        loss.backward()

    def settle(self) -> None:
        """Make the weights final, after the last step."""

    def weights(self) -> Weights:
        """Return a copy of the weights by name, gathered where they are in shards.

        All processes call it together.
        """
        found = {}
        for name, parameter in self.problem.model.named_parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            found[name] = whole.detach().numpy().copy()
        return found


def padded_trainer(problem: TorchProblem, library: str = "", **own: Any) -> TorchTrainer:
    """Return a trainer whose processes divide samples as DistributedSampler does."""
    division = PaddedDivision(problem.place, problem.batch)
    library = library or f"torch {torch.__version__}, gloo"
    return TorchTrainer(problem, division=division, library=library, **own)


class ExactTrainer(TorchTrainer):
    """Weights gradients by the number of samples, of which a rank may have none."""

    @collective
    def step(self, inputs: Any, targets: Any, samples: int) -> None:
        self.optimizer.zero_grad()
        exchange = self.optimizer.exchange
        if exchange is None or exchange.takes_samples:
            self.optimizer.sample_weight = samples
        if samples:
            self.backward(self.loss(inputs, targets))
        self.optimizer.step()

    @collective
    def settle(self) -> None:
        """Make the weights equal, if ranks have exchanged weights now and then."""
        self.optimizer.flush()


Wrap = Callable[[TorchProblem], TorchTrainer]


def train_torch(task: ContenderTask, place: ProcessPlace, wrap: Wrap) -> RankResult:
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


def _train_epoch(trainer: TorchTrainer, epoch: int, meter: StepMeter) -> None:
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


def _evaluate(trainer: TorchTrainer) -> tuple[Indices, Mapping[str, tuple[float, float]]]:
    """Evaluate this process's test samples, and return them and the sums of their scores."""
    problem = trainer.problem
    recipe = problem.recipe
    if recipe.test is None:
        return np.zeros(0, np.int64), {}
    own = trainer.division.test_share(len(recipe.test))
    starts = range(0, len(own), EVALUATED_TOGETHER)
    parts = [own[start : start + EVALUATED_TOGETHER] for start in starts]
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
