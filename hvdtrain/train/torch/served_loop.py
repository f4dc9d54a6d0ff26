"""Training with torch and a parameter server: workers compute gradients, servers step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hvdtrain.collective import collective
from hvdtrain.data.sampling.sharding import steps_per_epoch
from hvdtrain.train.loop.step_plan import StepPlan
from hvdtrain.train.metrics.totals import Totals
from hvdtrain.train.parameter_server.rounds import ServedRounds
from hvdtrain.train.parameter_server.settings import ParameterServer
from hvdtrain.train.parameter_server.shards import Piece
from hvdtrain.train.parameter_server.statistics import Pushes
from hvdtrain.train.parameter_server.wire import Flat
from hvdtrain.train.recipes.recipe import Recipe
from hvdtrain.train.torch.distributed import plain_optimizer
from hvdtrain.train.torch.loop import TorchLoop
from hvdtrain.train.torch.model import average_model_buffers
from hvdtrain.train.torch.shards.flat_parameters import FlatParameters
from hvdtrain.train.torch.shards.shard import TorchShard, load_states, require_elementwise
from hvdtrain.train.torch.sources import Batch, Step


class ServedLoop(TorchLoop):
    """A torch model whose weights the last ranks of the world serve.

    Servers and workers hold the same model after each call of train(), with the weights and the
    optimizer state of the servers.
    """

    def __init__(
        self, recipe: Recipe, step_plan: StepPlan, device: torch.device, settings: ParameterServer
    ) -> None:
        super().__init__(recipe, step_plan, device)
        self._row = FlatParameters(p for p in self._model.parameters() if p.requires_grad)
        self._rounds = ServedRounds(settings, self._row, self._make_shard)

    def _make_optimizer(self) -> Any:
        optimizer = plain_optimizer(self._recipe, self._model, self._step_plan.options)
        require_elementwise(optimizer)
        return optimizer

    def _make_shard(self, pieces: list[Piece], weights: Flat) -> TorchShard:
        flat, optimizer = torch.from_numpy(weights), self._make_optimizer()
        return TorchShard(optimizer, self._row.parameters, pieces, flat, self._set_rate)

    @collective
    def broadcast(self) -> None:
        """Copy the weights and the optimizer state of rank 0 to every rank."""
        super().broadcast()
        self._row.read_weights()
        if self._rounds.shard is not None:
            self._rounds.shard.load_state(self._optimizer)

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

    @collective
    def synchronize(self) -> None:
        """Average the statistics that forward passes have changed on each worker."""
        average_model_buffers(self._model, self._rounds.workers)

    def gather_state(self) -> None:
        """Do nothing: each rank has the whole state after train()."""

    @property
    def pushes(self) -> Pushes:
        """The gradients that servers have received in this start, over all shards."""
        return self._rounds.pushes

    @collective
    def train(self, epoch: int, done: int, go_on: Callable[[], bool]) -> Totals:
        """Train on the samples that are left of an epoch; see TrainingLoop.train."""
        self.state.settle()  # the weights change before the first step is taken
        if self._rounds.shard is None:
            learned = super().train(epoch, done, go_on)
        else:
            self._serve(self._rounds.shard, epoch, done, go_on)
            learned = self._sums.reduce()
        load_states(self._optimizer, self._row.parameters, self._rounds.collect())
        return learned

    def _serve(self, shard: TorchShard, epoch: int, done: int, go_on: Callable[[], bool]) -> None:
        plan = self._step_plan
        first = self._step_number = plan.position(epoch, done)

        def after_round() -> bool:
            self._set_rate(self._optimizer, self._step_number)
            self._step_number += 1
            return go_on()

        rounds = steps_per_epoch(plan.samples - done, plan.global_batch_size)
        self._rounds.serve(shard, first, rounds, after_round)

    def _step(self, step: Step, batches: list[Batch]) -> None:
        """Compute and push this worker's gradient of a round."""
        samples = sum(len(batch.microbatch.samples) for batch in batches)
        if self._rounds.pull(samples):
            self._backward(step, batches)
            self._rounds.push(step.number, samples)
        else:  # so that the records count every sample once
            with torch.no_grad():
                for batch in batches:
                    self._loss(step, batch)
        self._step_number = step.number + 1

    def _backward(self, step: Step, batches: list[Batch]) -> None:
        """Compute the gradient of the mean loss over this worker's samples."""
        self._model.zero_grad()
        samples = sum(len(batch.microbatch.samples) for batch in batches)
        for batch in batches:
            share = len(batch.microbatch.samples) / samples
            loss = self._loss(step, batch)
            (loss if share == 1.0 else loss * share).backward()
