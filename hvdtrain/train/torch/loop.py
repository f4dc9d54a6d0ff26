"""Training with torch, exact on any number of ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

import hvdtrain.torch as hvd
from hvdtrain.collective import collective
from hvdtrain.compiled import find_compiler
from hvdtrain.core.objects import allgather_object
from hvdtrain.data.sampling import seed_generators, step_seed
from hvdtrain.errors import UsageError, did_you_mean
from hvdtrain.topology import Topology
from hvdtrain.torch.functions import broadcast_module
from hvdtrain.torch.sync_batch_norm import count_batches
from hvdtrain.train.loop.gather import gathered_value, predict_on_all_ranks
from hvdtrain.train.loop.protocol import Array, TrainingLoop
from hvdtrain.train.loop.step_plan import Microbatch, StepPlan, note_samples
from hvdtrain.train.metrics import Gathered, Totals, Values
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.recipe import Recipe
from hvdtrain.train.torch.device import move_to
from hvdtrain.train.torch.sources import Batch, Source, Step, make_source
from hvdtrain.train.torch.state import TorchTrainingState, torch_checksums
from hvdtrain.train.torch.update import NonFinitePolicy, Precision, Updater, distributed_optimizer


class TorchMetricSums:
    """Adds up the samples, losses and metric counts of this rank."""

    def __init__(self, metrics: Mapping[str, Any], device: torch.device) -> None:
        self._metrics, self._device = metrics, device
        self._shapes: dict[str, list[int]] | None = None
        self._reset()

    def _reset(self) -> None:
        self._samples = 0
        self._loss = torch.zeros((), dtype=torch.float64, device=self._device)
        self._counts: dict[str, torch.Tensor] = {}
        self._seen = 0, 0.0

    def add(self, outputs: Any, targets: Any, mean_loss: torch.Tensor, samples: int) -> None:
        self._samples += samples
        self._loss.add_(mean_loss.detach(), alpha=samples)
        for name, metric in self._metrics.items():
            counts = metric.counts(outputs, targets)
            known = self._counts.get(name)
            self._counts[name] = counts if known is None else known + counts

    def mean_since(self) -> float:
        """Return the mean loss of this rank's samples since the last call; NaN without any."""
        (samples, loss), self._seen = self._seen, (self._samples, float(self._loss))
        count = self._samples - samples
        return (self._seen[1] - loss) / count if count else math.nan

    @collective
    def reduce(self) -> Totals:
        """Return the sums over all ranks, and start new ones."""
        shapes = self._agreed_shapes()
        parts = [torch.tensor([float(self._samples)], dtype=torch.float64), self._loss.cpu()[None]]
        for name, shape in shapes.items():
            counts = self._counts.get(name)
            empty = torch.zeros(shape, dtype=torch.float64)
            parts.append((empty if counts is None else counts.double().cpu()).reshape(-1))
        sums = hvd.allreduce(torch.cat(parts), name="score", op=hvd.Sum).numpy()
        self._reset()
        counts_of, start = {}, 2
        for name, shape in shapes.items():
            length = int(torch.Size(shape).numel())
            counts_of[name] = sums[start : start + length].reshape(shape)
            start += length
        return Totals(int(sums[0]), float(sums[1]), counts_of)

    @collective
    def _agreed_shapes(self) -> dict[str, list[int]]:
        """Return the shapes of counts, which a rank without samples does not know."""
        if self._shapes is None:
            own = {name: list(counts.shape) for name, counts in self._counts.items()}
            known = allgather_object(own, "shapes of metrics")
            self._shapes = max(known, key=len)
        return self._shapes


# Samples go through the model in chunks that do not depend on the number of ranks, so that their
# outputs are bitwise the same on any number.
_CHUNK = 128


def call_model(model: Any, inputs: Any) -> Any:
    """Call a model with one tensor, a tuple of arguments, or a mapping of keyword arguments."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)


def chunk_count(samples: int) -> int:
    return -(-samples // _CHUNK)


def own_chunks(samples: int, topology: Topology) -> list[Step]:
    """Return the chunks of this rank; each chunk is on one rank."""
    own = range(topology.rank, chunk_count(samples), topology.size)
    rows = [np.arange(n * _CHUNK, min((n + 1) * _CHUNK, samples)) for n in own]
    return [Step(n, part, [Microbatch(n, part)]) for n, part in zip(own, rows, strict=True)]


def as_array(tensor: torch.Tensor) -> Array:
    """Return a tensor as a numpy array; half types become float32."""
    kept = tensor.detach().cpu()
    wide = kept.float() if kept.dtype in (torch.bfloat16, torch.float16) else kept
    array: Array = wide.numpy()
    return array


_AVERAGED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Where CXX is not set; torch looks for no other.
_COMPILERS_OF_INDUCTOR = ("g++",)


def compile_model(model: torch.nn.Module, backend: str) -> Any:
    """Return the model compiled by torch.compile when it is first called."""
    if backend not in torch.compiler.list_backends(exclude_tags=None):
        known: list[str] = torch.compiler.list_backends()
        near = did_you_mean(backend, known)
        raise UsageError(
            f"--compile {backend}: torch has no such backend{near or ':'} it has {', '.join(known)}"
        )
    if backend == "inductor" and any(p.device.type == "cpu" for p in model.parameters()):
        try:
            find_compiler(os.environ, _COMPILERS_OF_INDUCTOR)
        except UsageError as error:
            raise UsageError(f"--compile {backend}: {error}") from None
    return torch.compile(model, backend=backend)


@collective
def average_model_buffers(model: torch.nn.Module, ranks: int | None = None) -> None:
    """Make a model's buffers equal on all ranks.

    Floating-point buffers of 16 bits and more are averaged; others are copied from rank 0. Batch
    normalization keeps running means and variances of the samples that a rank has seen; they do
    not change what is learned, but they change the results of an evaluation.
    """
    ranks = hvd.size() if ranks is None else ranks
    buffers = list(model.buffers())
    floating = [buffer for buffer in buffers if buffer.dtype in _AVERAGED]
    if floating:
        if hvd.rank() >= ranks:
            for buffer in floating:
                buffer.zero_()
        hvd.grouped_allreduce_(floating, name="buffers", postscale_factor=1 / ranks, op=hvd.Sum)
    rest = [(str(n), b) for n, b in enumerate(buffers) if b.dtype not in _AVERAGED]
    if rest:
        hvd.broadcast_parameters(rest, root_rank=0)


class TorchLoop(TrainingLoop):
    """A torch model in training: its weights, its optimizer and this rank's share of the data.

    Making one is local, up to the DistributedOptimizer's agreement on the model.
    """

    @collective
    def __init__(self, recipe: Recipe, step_plan: StepPlan, device: torch.device) -> None:
        options = step_plan.options
        self._step_plan, self._device, self._recipe = step_plan, device, recipe
        dtype = getattr(torch, options.dtype)
        self._move = partial(move_to, device=device, dtype=dtype)
        # Module.to() would make real numbers of complex ones, and others of float8 buffers.
        self._model = recipe.model.to(device)._apply(
            lambda each: each.to(dtype) if each.is_floating_point() and each.itemsize > 1 else each
        )
        precision = Precision(options.amp, device)
        self._call = self._model  # what is called to train
        if options.compile is not None:
            self._call = compile_model(self._model, options.compile)
        self._optimizer = self._make_optimizer()
        # Its layers are collective, so a rank without samples for a step takes part with others'.
        self._normalizes = step_plan.topology.size > 1 and _normalizes(self._model, options)
        # Groups with learning rates of their own keep them in proportion to the first group's.
        rates = [group["lr"] for group in self._optimizer.param_groups]
        self._lr_ratios = [rate / rates[0] if rates[0] else 1.0 for rate in rates]
        self._rates: list[float] = []  # of the last step, of all groups
        self._updater = Updater(
            self._model, self._optimizer, precision, options.clip_norm, options.ema
        )
        extras = {"scaler": precision.scaler, "ema": self._updater.averaged}
        kept = {name: extra for name, extra in extras.items() if extra is not None}
        self.state = TorchTrainingState(self._model, self._optimizer, kept)
        self._source = make_source(
            recipe.train, self._move, options.seed, options.workers, recipe.augment, recipe.collate
        )
        self.metrics = {n: m for n, m in recipe.metrics.items() if not isinstance(m, Gathered)}
        self.test_metrics = recipe.metrics
        self._sums = TorchMetricSums(self.metrics, device)
        self._test: Source | None = None
        if recipe.test is not None:
            self._test = make_source(
                recipe.test, self._move, options.seed, options.workers, None, recipe.collate
            )
        self._feed: Iterator[tuple[Step, list[Batch]]] = iter(())
        self._position, self._step_number = (-1, 0), 0
        self._non_finite = NonFinitePolicy(options.non_finite, step_plan.topology.rank)
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        self.gradient_bytes = sum(p.numel() * p.element_size() for p in parameters)

    @collective
    def _make_optimizer(self) -> Any:
        return distributed_optimizer(self._recipe, self._model, self._step_plan.options)

    @property
    def lr(self) -> float:
        rate: float = self._optimizer.param_groups[0]["lr"]
        return rate

    def lend(self) -> tuple[Any, Any]:
        self.state.settle()
        return super().lend()

    def own_loss(self) -> float:
        return self._sums.mean_since()

    @collective
    def broadcast(self) -> None:
        broadcast_module(self._model)
        hvd.broadcast_optimizer_state(self._optimizer, root_rank=0)
        self._updater.broadcast()
        self._rates = [float(group["lr"]) for group in self._optimizer.param_groups]

    @collective
    def train(self, epoch: int, done: int, go_on: Callable[[], bool]) -> Totals:
        self._model.train()
        if self._position != (epoch, done):
            self._feed = self._batches(epoch, done)
        try:
            for step, batches in self._feed:
                self._set_rate(self._optimizer, step.number)
                note_samples(epoch, done, step.own)
                self._step(step, batches)
                done += len(step.samples)
                self._position = (epoch, done)
                if not go_on():
                    break
        finally:
            if self._normalizes:  # a caller may go on with the model
                count_batches(self._model, True)
        if self._exchanges_weights:
            self._non_finite.report_left_out(self._step_number)
        return self._sums.reduce()

    def _batches(self, epoch: int, done: int) -> Iterator[tuple[Step, list[Batch]]]:
        steps = (
            Step(number, batch, self._step_plan.microbatches(batch, self._normalizes))
            for number, batch in self._step_plan.batches(epoch, done)
        )
        return self._source.batches(steps, epoch)

    def fits(self, epoch: int) -> bool:
        if self._normalizes:  # the others would wait for a rank that lacks memory
            return True
        self._model.train()
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        try:
            step, batches = next(self._batches(epoch, 0))
            for batch in batches:
                loss = self._loss(step, batch, counted=False)
                torch.autograd.grad(loss, parameters, allow_unused=True)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or "t allocate memory" in str(error):
                return False
            raise
        return True

    def _set_rate(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Set the learning rates for a step, counted from 0 over all epochs."""
        rate = self._step_plan.lr(step)
        rates = [rate * ratio for ratio in self._lr_ratios]
        if optimizer is self._optimizer:
            self._refuse_other_rates(step)
            self._rates = rates
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def _refuse_other_rates(self, step: int) -> None:
        """Refuse rates that a callback or the recipe has set, which would have no effect."""
        groups = self._optimizer.param_groups
        for number, (group, known) in enumerate(zip(groups, self._rates, strict=True)):
            if group["lr"] != known:
                raise UsageError(
                    f"the learning rate of parameter group {number} was changed from {known:g} to "
                    f"{float(group['lr']):g} before step {step + 1}, but train sets it in each "
                    "step: leave that to --schedule and --lr"
                )

    @collective
    def synchronize(self) -> None:
        self.state.settle()
        self._optimizer.flush()
        for model in filter(None, [self._model, self._updater.averaged]):
            average_model_buffers(model)

    @collective
    def gather_state(self) -> None:
        self._optimizer.consolidate_state_dict()

    def bucket_plan(self) -> Any:
        return self._optimizer.bucket_plan()

    @collective
    def use_bucket_plan(self, plan: Any) -> None:
        self._optimizer.use_bucket_plan(plan)

    def checksums(self) -> Mapping[str, int]:
        # Random numbers depend on seed and step alone: if these are equal, so are they.
        numbers = {"seed": float(self._step_plan.options.seed), "step": float(self._step_number)}
        local = self._exchanges_weights
        return torch_checksums(self._model, None if local else self._optimizer, numbers)

    @collective
    def evaluate(self) -> Values:
        if self._test is None:
            return {}
        model, samples = self._in_evaluation(), len(self._recipe.test)
        gathered = {n: m for n, m in self.test_metrics.items() if isinstance(m, Gathered)}
        sums = TorchMetricSums(self.metrics, self._device)
        losses = torch.zeros(chunk_count(samples), dtype=torch.float64)
        kept: list[tuple[Array, Array, Array]] = []
        with torch.no_grad():
            chunks = own_chunks(samples, self._step_plan.topology)
            for step, (batch,) in self._test.batches(chunks, 0):
                outputs, rows = self._outputs(model, batch.inputs), batch.microbatch.samples
                mean_loss = self._mean_loss(outputs, batch.targets)
                sums.add(outputs, batch.targets, mean_loss, len(rows))
                losses[step.number] = float(mean_loss) * len(rows)
                if gathered:
                    kept.append((rows, as_array(outputs), as_array(batch.targets)))
        totals = sums.reduce()
        # Each chunk is on one rank only: added in order, their losses give the same bits.
        in_order = hvd.allreduce(losses, name="losses", op=hvd.Sum).tolist()
        totals = Totals(totals.samples, sum(in_order), totals.counts)
        values = totals.values(self.metrics)
        nothing: list[Array] = [np.zeros(0, np.int64)] * 3
        columns = [np.concatenate(c) for c in zip(*kept, strict=True)] if kept else nothing
        for name, metric in gathered.items():
            values[name] = gathered_value(metric, *columns)
        return values

    @collective
    def predict(self, inputs: Array) -> Array:
        tensor = self._move(torch.from_numpy(inputs))
        model = self._in_evaluation()
        chunks = own_chunks(len(tensor), self._step_plan.topology)

        def outputs_of(rows: Array) -> Array:
            with torch.no_grad():
                outputs = self._outputs(model, tensor[torch.from_numpy(rows)])
            return as_array(outputs)

        return predict_on_all_ranks([step.samples for step in chunks], outputs_of)

    @collective
    def _step(self, step: Step, batches: list[Batch]) -> None:
        if self._step_plan.options.virtual_shards is None:
            self._backward(step, batches)
        else:
            self._backward_by_shards(step, batches)
        self._step_number = step.number + 1
        self.state.settle()
        update = self._updater.step()
        if update.fault:
            present = [batch for batch in batches if batch.inputs is not None]
            losses = [partial(self._loss, step, batch, counted=False) for batch in present]
            self._non_finite.handle(step.number + 1, self._model, losses)
        elif self._optimizer.exchanges_weights:
            self._non_finite.count_left_out(update.skipped)

    def _backward(self, step: Step, batches: list[Batch]) -> None:
        self._updater.begin([batch.microbatch.count for batch in batches])
        for batch in batches:
            count = batch.microbatch.count
            self._updater.backward(self._loss(step, batch, counted=count > 0), count)

    def _backward_by_shards(self, step: Step, batches: list[Batch]) -> None:
        self._optimizer.zero_grad()
        shards = self._step_plan.options.virtual_shards or 1
        by_key = {batch.microbatch.key: batch for batch in batches}

        def loss_of(shard: int) -> torch.Tensor:
            batch = by_key[shard]
            if batch.inputs is None:
                nothing: torch.Tensor = 0.0 * next(self._model.parameters()).sum()
                return nothing
            share = batch.microbatch.count / len(step.samples)
            return self._updater.precision.scaled(self._loss(step, batch) * share)

        hvd.backward_by_shards(self._model.parameters(), shards, loss_of)

    def _loss(self, step: Step, batch: Batch, counted: bool = True) -> torch.Tensor:
        """Return the mean loss of a batch, and add it to the sums."""
        seed_generators(step_seed(self._step_plan.options.seed, step.number, batch.microbatch.key))
        if self._normalizes:
            count_batches(self._model, batch.microbatch.counted)
        outputs = self._outputs(self._call, batch.inputs)
        loss = self._mean_loss(outputs, batch.targets)
        if counted:
            self._sums.add(outputs.detach(), batch.targets, loss, batch.microbatch.count)
        return loss

    def _in_evaluation(self) -> Any:
        """Return the model to evaluate, in that mode."""
        averaged = self._updater.averaged
        (self._model if averaged is None else averaged).eval()
        return self._call if averaged is None else averaged

    def _outputs(self, model: Any, inputs: Any) -> Any:
        with self._updater.precision.autocast():
            return call_model(model, inputs)

    def _mean_loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        with self._updater.precision.autocast():
            loss: Any = self._recipe.loss(outputs, targets)
        if isinstance(loss, torch.Tensor) and not loss.ndim:
            return loss
        shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else ""
        raise UsageError(
            "the loss of a recipe must return one number, the mean over the batch, as a "
            f"torch.Tensor without dimensions, got a {type(loss).__name__}{shape}"
        )


def _normalizes(model: torch.nn.Module, options: TrainOptions) -> bool:
    """Return whether a model normalizes over the batches of all ranks, which must do as many."""
    if not any(isinstance(module, hvd.SyncBatchNorm) for module in model.modules()):
        return False
    if options.virtual_shards is not None or options.parameter_server is not None:
        raise UsageError(
            "hvd.SyncBatchNorm normalizes over the batches that all ranks compute at once, which "
            "neither virtual shards nor workers of a parameter server do: use torch.nn.BatchNorm"
        )
    return True
