"""Training with torch and a parameter server: workers compute gradients, servers step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import hvdtrain.torch as hvd
from hvdtrain.core import context
from hvdtrain.core.point_to_point import open_point_to_point
from hvdtrain.data.sampling.sharding import steps_per_epoch
from hvdtrain.errors import OneRankTrainingError
from hvdtrain.train.loop.step_plan import StepPlan
from hvdtrain.train.metrics.totals import Totals
from hvdtrain.train.parameter_server.protocol import (
    AsynchronousProtocol,
    Protocol,
    SynchronousProtocol,
)
from hvdtrain.train.parameter_server.server import Server
from hvdtrain.train.parameter_server.settings import ParameterServer
from hvdtrain.train.parameter_server.shards import pieces, shard_bounds
from hvdtrain.train.parameter_server.statistics import Pushes
from hvdtrain.train.parameter_server.worker import Worker
from hvdtrain.train.recipes.recipe import Recipe
from hvdtrain.train.torch.distributed import plain_optimizer
from hvdtrain.train.torch.loop import TorchLoop
from hvdtrain.train.torch.model import average_model_buffers
from hvdtrain.train.torch.shards.collect import collect_state, collect_weights
from hvdtrain.train.torch.shards.flat_parameters import FlatParameters
from hvdtrain.train.torch.shards.shard import TorchShard, require_elementwise
from hvdtrain.train.torch.sources import Batch, Step

__all__ = ["ServedLoop"]


class ServedLoop(TorchLoop):
    """A torch model whose weights the last ranks of the world serve.

    Servers and workers hold the same model after each call of train(), with the weights and the
    optimizer state of the servers.

    Args:
        recipe: model, data, loss, optimizer and metrics.
        step_plan: steps of the run.
        device: device of the model and the batches; servers step on the host.
        settings: options of the parameter server.

    Raises:
        UsageError: the optimizer cannot step on parts of parameters.
    """

    def __init__(
        self, recipe: Recipe, step_plan: StepPlan, device: torch.device, settings: ParameterServer
    ) -> None:
        super().__init__(recipe, step_plan, device)
        self._settings, self._pushes = settings, Pushes()
        here = context.current()
        rank, size = here.topology.rank, here.topology.size
        self._workers = size - settings.servers
        self._flat = FlatParameters(p for p in self._model.parameters() if p.requires_grad)
        ranges = shard_bounds(self._flat.sizes, settings.servers)
        self._bounds = dict(zip(range(self._workers, size), ranges, strict=True))
        self._messages = open_point_to_point(here.world)
        self._blocked = here.blocked.running
        self._worker = Worker(self._messages, self._bounds, self._blocked)
        self._shard = self._make_shard(self._bounds[rank]) if rank in self._bounds else None
        self._first = 0

    def _make_optimizer(self) -> Any:
        optimizer = plain_optimizer(self._recipe, self._model, self._step_plan.options)
        require_elementwise(optimizer)
        return optimizer

    def _make_shard(self, bounds: tuple[int, int]) -> TorchShard:
        return TorchShard(
            self._make_optimizer(),
            self._flat.parameters,
            list(pieces(self._flat.sizes, bounds)),
            self._flat.weights[slice(*bounds)],
            lambda optimizer, number: self._set_rate(optimizer, self._first + number),
        )

    def broadcast(self) -> None:
        """Copy the weights and the optimizer state of rank 0 to every rank (collective)."""
        super().broadcast()
        self._flat.read_weights()
        if self._shard is not None:
            self._shard.load_state(self._optimizer)

    def bucket_plan(self) -> None:
        """Return None: gradients travel as a whole."""

    def use_bucket_plan(self, plan: Any) -> None:
        """Ignore the plan of a run that has all-reduced."""

    @property
    def _exchanges_weights(self) -> bool:
        return False

    @property
    def synchronized(self) -> bool:
        """Whether the weights of all ranks are equal: always after train()."""
        return True

    def synchronize(self) -> None:
        """Average the statistics that forward passes have changed on each worker (collective)."""
        average_model_buffers(self._model, self._workers)

    @property
    def pushes(self) -> Pushes:
        """The gradients that servers have received in this start, over all shards."""
        return self._pushes

    def train(self, epoch: int, done: int, go_on: Callable[[], bool]) -> Totals:
        """Train on the samples that are left of an epoch (collective); see TrainingLoop.train."""
        self.state.settle()  # the weights change before the first step is taken
        pushes = Pushes()
        if self._shard is None:
            learned = super().train(epoch, done, go_on)
        else:
            pushes = self._serve(self._shard, epoch, done, go_on)
            learned = self._sums.reduce()
        self._collect(pushes)
        return learned

    def _serve(self, shard: TorchShard, epoch: int, done: int, go_on: Callable[[], bool]) -> Pushes:
        plan = self._step_plan
        self._first = self._step_number = plan.position(epoch, done)

        def after_round() -> bool:
            self._set_rate(self._optimizer, self._step_number)
            self._step_number += 1
            return go_on()

        server = Server(self._messages, shard, self._protocol(), self._blocked)
        rounds = steps_per_epoch(plan.samples - done, plan.global_batch_size)
        return server.serve(rounds, after_round)

    def _protocol(self) -> Protocol:
        settings = self._settings
        if settings.is_async:
            return AsynchronousProtocol(self._workers, settings.staleness)
        return SynchronousProtocol(self._workers, settings.backup)

    def _collect(self, pushes: Pushes) -> None:
        """Bring the servers' weights, optimizer state and statistics to all ranks (collective)."""
        outline = [] if self._shard is None else self._shard.outline()
        gathered = hvd.allgather_object((outline, pushes), name="shards")
        outlines = {server: gathered[server][0] for server in self._bounds}
        for _, of_rank in gathered:
            self._pushes.add(of_rank)
        collect_weights(self._flat, self._bounds)
        collect_state(self._optimizer, self._flat, self._bounds, outlines, self._shard)

    def _step(self, step: Step, batches: list[Batch]) -> None:
        """Compute and push this worker's gradient of a round."""
        samples = sum(len(batch.microbatch.samples) for batch in batches)
        if self._worker.pull(self._flat.weights.numpy(), samples):
            self._flat.write_weights()
            self._backward(step, batches)
            self._push(step, samples)
        else:  # so that the records count every sample once
            with torch.no_grad():
                for batch in batches:
                    self._loss(step, batch)
        self._step_number = step.number + 1

    def _backward(self, step: Step, batches: list[Batch]) -> None:
        """Compute the gradient of the mean loss over this worker's samples (local)."""
        self._model.zero_grad()
        samples = sum(len(batch.microbatch.samples) for batch in batches)
        for batch in batches:
            share = len(batch.microbatch.samples) / samples
            loss = self._loss(step, batch)
            (loss if share == 1.0 else loss * share).backward()

    def _push(self, step: Step, samples: int) -> None:
        self._flat.read_gradients()
        if samples and not self._flat.gradients.isfinite().all():
            raise OneRankTrainingError(
                f"step {step.number + 1}: the gradient of this rank is not finite. Lower --lr, "
                "lengthen --warmup-epochs, or look at the samples of this step"
            )
        self._worker.push(self._flat.gradients.numpy(), samples)
