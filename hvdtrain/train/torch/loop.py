"""Training with torch, exact on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

import hvdtrain.torch as hvd
from hvdtrain.collective import collective
from hvdtrain.data.sampling import seed_generators, step_seed
from hvdtrain.errors import UsageError
from hvdtrain.torch.functions import broadcast_module
from hvdtrain.torch.sync_batch_norm import count_batches
from hvdtrain.train.loop.gather import gathered_value, predict_on_all_ranks
from hvdtrain.train.loop.protocol import Array, TrainingLoop
from hvdtrain.train.loop.step_plan import StepPlan, note_samples
from hvdtrain.train.metrics import Gathered, Totals, Values
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.recipe import Recipe
from hvdtrain.train.torch.device import move_to
from hvdtrain.train.torch.evaluation import (
    Precision,
    TorchMetricSums,
    as_array,
    average_model_buffers,
    call_model,
    chunk_count,
    compile_model,
    own_chunks,
)
from hvdtrain.train.torch.sources import Batch, Source, Step, make_source
from hvdtrain.train.torch.state import TorchTrainingState, torch_checksums
from hvdtrain.train.torch.update import NonFinitePolicy, Updater, distributed_optimizer


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
        self._updater = Updater(
            self._model, self._optimizer, precision, options.clip_norm, options.ema
        )
        extras = {"scaler": precision.scaler, "ema": self._updater.averaged}
        kept = {name: extra for name, extra in extras.items() if extra is not None}
        self.state = TorchTrainingState(self._model, self._optimizer, kept)
        self._train = make_source(
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

    def own_loss(self) -> float:
        return self._sums.mean_since()

    @collective
    def broadcast(self) -> None:
        broadcast_module(self._model)
        hvd.broadcast_optimizer_state(self._optimizer, root_rank=0)
        self._updater.broadcast()

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
        return self._train.batches(steps, epoch)

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
        for group, ratio in zip(optimizer.param_groups, self._lr_ratios, strict=True):
            group["lr"] = rate * ratio

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
