"""Training with torch: problem and loop, which all strategies share, and what each does else."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

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
from hvdtrain.train.torch.loop import call_model
from hvdtrain.train.torch.sources import Source, Step, make_source
from hvdtrain.train.torch.update import plain_optimizer
from hvdtrain_bench.compare.meters import (
    EVALUATED_TOGETHER,
    ContenderTask,
    Division,
    ExactDivision,
    PaddedDivision,
    ProcessPlace,
    RankResult,
    StepMeter,
    Weights,
)
from hvdtrain_bench.compare.strategies import PERIOD_STEPS, WARM_UP_STEPS


@dataclass(frozen=True)
class TorchProblem:
    place: ProcessPlace
    variant: str
    recipe: Recipe
    plan: StepPlan
    options: TrainOptions

    @property
    def model(self) -> torch.nn.Module:
        model: torch.nn.Module = self.recipe.model
        return model

    @property
    def batch(self) -> int:
        """Samples of all ranks per step."""
        return self.plan.global_batch_size

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return plain_optimizer(self.recipe, model, self.options)

    def source(self, data: Any, augment: Any = None) -> Source:
        """Return what reads training or test samples."""
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
    return TorchProblem(place, task.variant, recipe, plan, options)


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
        for group, ratio in zip(self.optimizer.param_groups, self._ratios, strict=True):
            group["lr"] = rate * ratio

    def step(self, inputs: Any, targets: Any, samples: int) -> None:
        self.optimizer.zero_grad()
        self.backward(self.loss(inputs, targets))
        self.optimizer.step()

    def loss(self, inputs: Any, targets: Any) -> torch.Tensor:
        loss: torch.Tensor = self.problem.recipe.loss(self.outputs(inputs), targets)
        return loss

    def outputs(self, inputs: Any) -> Any:
        return call_model(self.model, inputs)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def settle(self) -> None:
        """Make the weights final, after the last step."""

    def weights(self) -> Weights:
        """Return a copy of the weights by name, gathered where they are in shards (collective)."""
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
    source = problem.source(problem.recipe.train, problem.recipe.augment)
    trainer.model.train()
    meter.begin()
    for step, (batch,) in source.batches(steps, epoch):
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
        for step, (batch,) in problem.source(recipe.test).batches(steps, 0):
            outputs, samples = trainer.outputs(batch.inputs), len(step.samples)
            loss = float(recipe.loss(outputs, batch.targets))
            sums["loss"] += (loss * samples, samples)
            for name, metric in accuracies.items():
                sums[name] += metric.counts(outputs, batch.targets).numpy()
    return own, {name: (float(total), float(count)) for name, (total, count) in sums.items()}


def _hvdtrain(problem: TorchProblem) -> TorchTrainer:
    import hvdtrain.torch as hvd
    from hvdtrain import __version__
    from hvdtrain.core import context

    hvd.init()
    sharded = problem.variant == "sharded"
    hvd.broadcast_parameters(problem.model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        problem.optimizer(problem.model),
        problem.model.named_parameters(),
        exchange=None if sharded else problem.variant or None,
        sharded=sharded,
    )
    mpi = context.current().library.partition(" (")[0]
    return ExactTrainer(problem, optimizer=optimizer, library=f"hvdtrain {__version__} on {mpi}")


def _horovod(problem: TorchProblem) -> TorchTrainer:
    import horovod
    import horovod.torch as hvd

    if not hvd.mpi_built():
        raise UsageError("Horovod was built without MPI: python -m hvdtrain build-horovod --force")
    hvd.init()
    own = problem.optimizer(problem.model)
    optimizer = hvd.DistributedOptimizer(own, problem.model.named_parameters())
    hvd.broadcast_parameters(problem.model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return padded_trainer(problem, optimizer=optimizer, library=f"Horovod {horovod.__version__}")


def _ddp(problem: TorchProblem) -> TorchTrainer:
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    return padded_trainer(problem, model=DistributedDataParallel(problem.model))


def _fsdp2(problem: TorchProblem) -> TorchTrainer:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    fully_shard(problem.model, mesh=init_device_mesh("cpu", (problem.place.size,)))
    optimizer = problem.optimizer(problem.model)
    fused = any(group.get("fused") for group in optimizer.param_groups)
    for group in optimizer.param_groups:
        group["fused"] = False
    trainer = padded_trainer(problem, optimizer=optimizer)
    if fused:  # torch 2.13: "aten._fused_sgd_.default does not have a sharding strategy"
        trainer.notes.append("torch's fused optimizer takes no shards: it is replaced by the usual")
    return trainer


def _postlocal(problem: TorchProblem) -> TorchTrainer:
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
        PostLocalSGDState,
        post_localSGD_hook,
    )
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(problem.model)
    # By default a subgroup has all ranks of a host, which would then never train on their own.
    alone, _ = dist.new_subgroups(group_size=1)
    state = PostLocalSGDState(None, subgroup=alone, start_localSGD_iter=WARM_UP_STEPS)
    model.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(period=PERIOD_STEPS, warmup_steps=WARM_UP_STEPS)
    optimizer = PostLocalSGDOptimizer(problem.optimizer(model), averager)
    trainer = padded_trainer(problem, model=model, optimizer=optimizer)
    trainer.notes.append(
        f"gradients are averaged for {WARM_UP_STEPS} steps, then weights every {PERIOD_STEPS}"
    )
    return trainer


def _dp(problem: TorchProblem) -> TorchTrainer:
    model = torch.nn.DataParallel(problem.model)
    trainer = TorchTrainer(problem, model=model)
    if not model.device_ids:
        trainer.notes.append("without GPUs DataParallel is the model alone, in one process")
    return trainer


class AcceleratedDivision:
    """Divides the numbers of samples with data loaders that Accelerate has prepared."""

    def __init__(self, accelerator: Any, batch: int) -> None:
        self._accelerator, self._batch = accelerator, batch

    def train_shares(self, order: Indices) -> list[Indices]:
        each = self._batch // self._accelerator.num_processes
        return [part.numpy() for part in self._prepared(order, each)]

    def test_share(self, samples: int) -> Indices:
        """Return the test samples that this process evaluates and that count; see Division."""
        kept = [np.zeros(0, np.int64)]
        for part in self._prepared(np.arange(samples), EVALUATED_TOGETHER):
            # Those of all processes, in their order, without the padding at the end.
            counted = self._accelerator.gather_for_metrics(part).numpy()
            start = len(part) * self._accelerator.process_index
            kept.append(counted[start : start + len(part)])
        return np.concatenate(kept)

    def _prepared(self, numbers: Indices, each: int) -> Any:
        loader: Any = DataLoader(torch.from_numpy(numbers), each)  # type: ignore[arg-type]
        return self._accelerator.prepare(loader)


class AcceleratedTrainer(TorchTrainer):
    """Lets Accelerate prepare model, optimizer and data."""

    def __init__(self, problem: TorchProblem) -> None:
        import accelerate

        self._accelerator: Any = accelerate.Accelerator(cpu=True)
        own = problem.optimizer(problem.model)
        model, optimizer = self._accelerator.prepare(problem.model, own)
        super().__init__(
            problem,
            model=model,
            optimizer=optimizer,
            division=AcceleratedDivision(self._accelerator, problem.batch),
            library=f"Accelerate {accelerate.__version__}, torch {torch.__version__}, gloo",
        )

    def outputs(self, inputs: Any) -> Any:
        # In evaluation processes may have different numbers of batches, which DDP does not allow.
        return call_model(self.model if self.model.training else self.problem.model, inputs)

    def backward(self, loss: torch.Tensor) -> None:
        self._accelerator.backward(loss)


_WAYS: Mapping[str, Callable[[TorchProblem], TorchTrainer]] = {
    "one": TorchTrainer,
    "hvdtrain": _hvdtrain,
    "horovod": _horovod,
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "dp": _dp,
    "accelerate": AcceleratedTrainer,
    "torch-postlocal": _postlocal,
}


def train(task: ContenderTask, place: ProcessPlace) -> RankResult:
    """Train as a strategy does, and destroy the process group that it has made, if any."""
    result = train_torch(task, place, _WAYS[task.strategy])
    if dist.is_initialized():
        dist.destroy_process_group()
    return result
