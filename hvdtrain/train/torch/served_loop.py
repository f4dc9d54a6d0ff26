"""Training with torch and a parameter server: workers compute gradients, servers step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from hvdtrain.collective import collective
from hvdtrain.core.sharding.segments import Segment
from hvdtrain.data.sampling import steps_per_epoch
from hvdtrain.errors import UsageError
from hvdtrain.torch.sharding.segment_optimizer import ELEMENTWISE, is_elementwise
from hvdtrain.train.loop.step_plan import StepPlan
from hvdtrain.train.metrics import Totals
from hvdtrain.train.parameter_server.protocol import ParameterServer
from hvdtrain.train.parameter_server.rounds import (
    Flat,
    ParameterRow,
    ServedRounds,
    Shard,
    State,
    refuse_optimizer,
)
from hvdtrain.train.recipe import Recipe
from hvdtrain.train.torch.loop import TorchLoop, average_model_buffers
from hvdtrain.train.torch.sources import Batch, Step
from hvdtrain.train.torch.update import complete_momenta, plain_optimizer


def torch_row(parameters: Iterable[torch.nn.Parameter]) -> ParameterRow:
    """Return memory for parameters and gradients."""
    given = list(parameters)
    types = [str(parameter.dtype).removeprefix("torch.") for parameter in given]
    return ParameterRow(given, types, _flat, _write, lambda: [p.grad for p in given])


def _flat(tensor: torch.Tensor) -> Flat:
    array: Flat = tensor.detach().cpu().reshape(-1).numpy()
    return array


def _write(parameter: torch.nn.Parameter, elements: Flat) -> None:
    parameter.detach().copy_(torch.from_numpy(elements).view(parameter.shape))


class TorchShard(Shard):
    """A shard whose parameters are parts of the model's."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[torch.nn.Parameter],
        segments: Sequence[Segment],
        weights: Flat,
        set_rate: Callable[[torch.optim.Optimizer, int], None],
        whole: torch.optim.Optimizer,
    ) -> None:
        super().__init__(segments, weights)
        self._optimizer, self._set_rate, self._whole = optimizer, set_rate, whole
        self._parameters = [parameters[segment.parameter] for segment in segments]
        self._own = [torch.nn.Parameter(torch.from_numpy(part)) for part in self.parts(weights)]
        own = {id(p): t for p, t in zip(self._parameters, self._own, strict=True)}
        for group in optimizer.param_groups:
            group["params"] = [own[id(p)] for p in group["params"] if id(p) in own]

    def step(self, gradient: Flat, number: int) -> None:
        # Callbacks may freeze parameters, and change settings of the whole optimizer.
        rows = zip(self._own, self._parameters, self.parts(gradient), strict=True)
        for tensor, parameter, part in rows:
            tensor.grad = torch.from_numpy(part) if parameter.requires_grad else None
        groups = zip(self._optimizer.param_groups, self._whole.param_groups, strict=True)
        for group, settings in groups:
            group.update(settings | {"params": group["params"]})
        self._set_rate(self._optimizer, number)
        complete_momenta(self._optimizer)
        self._optimizer.step()

    def states(self) -> list[State]:
        return read_states(self._optimizer, self._own)

    def load(self, states: Sequence[State]) -> None:
        self._optimizer.state.clear()
        write_states(self._optimizer, self._own, states)


def read_states(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]
) -> list[State]:
    return [
        {
            name: _flat(value) if is_elementwise(name, value, parameter.shape) else value
            for name, value in optimizer.state.get(parameter, {}).items()
        }
        for parameter in parameters
    ]


def write_states(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.nn.Parameter],
    states: Sequence[State],
) -> None:
    for parameter, state in zip(parameters, states, strict=True):
        if state:
            optimizer.state[parameter] = {n: _kept(v, parameter) for n, v in state.items()}


def _kept(value: Any, parameter: torch.nn.Parameter) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value).view(parameter.shape).to(parameter.device, copy=True)
    return value.to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


class ServedLoop(TorchLoop):
    """A torch model whose weights the last ranks of the world serve.

    Servers and workers hold the same model after each call of train(), with the weights and the
    optimizer state of the servers.
    """

    @collective
    def __init__(
        self, recipe: Recipe, step_plan: StepPlan, device: torch.device, settings: ParameterServer
    ) -> None:
        super().__init__(recipe, step_plan, device)
        self._row = torch_row(p for p in self._model.parameters() if p.requires_grad)
        self._rounds = ServedRounds(settings, self._row, self._make_shard)

    def _make_optimizer(self) -> Any:
        optimizer = plain_optimizer(self._recipe, self._model, self._step_plan.options)
        if type(optimizer) not in ELEMENTWISE:
            refuse_optimizer(optimizer, "torch", ELEMENTWISE)
        return optimizer

    def _make_shard(self, segments: Sequence[Segment], weights: Flat) -> TorchShard:
        parameters, optimizer = self._row.parameters, self._make_optimizer()
        return TorchShard(optimizer, parameters, segments, weights, self._set_rate, self._optimizer)

    @collective
    def broadcast(self) -> None:
        super().broadcast()
        self._rounds.load(self._states)

    def _states(self) -> list[State]:
        return read_states(self._optimizer, self._row.parameters)

    def bucket_plan(self) -> None:
        """Return None: gradients travel as a whole."""

    def use_bucket_plan(self, plan: Any) -> None:
        """Ignore the plan of a run that has all-reduced."""

    @collective
    def synchronize(self) -> None:
        """Average the statistics that forward passes have changed on each worker."""
        average_model_buffers(self._model, self._rounds.workers)

    def gather_state(self) -> None:
        """Do nothing: each rank has the whole state after train()."""

    @collective
    def train(self, epoch: int, done: int, go_on: Callable[[], bool]) -> Totals:
        self.state.settle()  # the weights change before the first step is taken
        self._refuse_other_rates(self._step_plan.position(epoch, done))  # before any rank waits
        if self._rounds.lent:
            served = set(self._row.parameters)
            for name, parameter in self._model.named_parameters():
                if parameter.requires_grad and parameter not in served:
                    raise UsageError(
                        f"parameter {name} was frozen when training began, so no server has it: "
                        "freeze it in on_train_begin, or leave out --strategy ps"
                    )
            self._rounds.load(self._states)
        if self._rounds.serves:
            self._serve(epoch, done, go_on)
            learned = self._sums.reduce()
        else:
            learned = super().train(epoch, done, go_on)
        write_states(self._optimizer, self._row.parameters, self._rounds.collect())
        return learned

    def _serve(self, epoch: int, done: int, go_on: Callable[[], bool]) -> None:
        plan = self._step_plan
        first = self._step_number = plan.position(epoch, done)

        def after_round() -> bool:
            self._set_rate(self._optimizer, self._step_number)
            self._step_number += 1
            return go_on()

        rounds = steps_per_epoch(plan.samples - done, plan.global_batch_size)
        self._rounds.serve(first, rounds, after_round)

    def _step(self, step: Step, batches: list[Batch]) -> None:
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
