"""Training with torch and a parameter server: workers compute gradients, servers step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from hvdtrain.collective import collective
from hvdtrain.data.sampling import steps_per_epoch
from hvdtrain.errors import UsageError
from hvdtrain.train.loop.step_plan import StepPlan
from hvdtrain.train.metrics import Totals
from hvdtrain.train.parameter_server.protocol import Flat, Outline, ParameterRow, Piece, State
from hvdtrain.train.parameter_server.rounds import ServedRounds
from hvdtrain.train.parameter_server.settings import ParameterServer
from hvdtrain.train.recipes.recipe import Recipe
from hvdtrain.train.torch.evaluation import average_model_buffers
from hvdtrain.train.torch.loop import TorchLoop
from hvdtrain.train.torch.sources import Batch, Step
from hvdtrain.train.torch.update import plain_optimizer


class FlatParameters(ParameterRow):
    """Copies of parameters and gradients in host memory."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self.parameters = list(parameters)
        types = [str(parameter.dtype).removeprefix("torch.") for parameter in self.parameters]
        super().__init__([parameter.numel() for parameter in self.parameters], types)
        self._weights = torch.from_numpy(self.weights).split(self.sizes)
        self._gradients = torch.from_numpy(self.gradients).split(self.sizes)

    def read_weights(self) -> None:
        for part, parameter in zip(self._weights, self.parameters, strict=True):
            part.copy_(parameter.detach().reshape(-1))

    def write_weights(self) -> None:
        for part, parameter in zip(self._weights, self.parameters, strict=True):
            parameter.detach().copy_(part.view(parameter.shape))

    def read_gradients(self) -> None:
        for part, parameter in zip(self._gradients, self.parameters, strict=True):
            if parameter.grad is None:
                part.zero_()
            else:
                part.copy_(parameter.grad.reshape(-1))


# Optimizers whose step for an element depends on no other element.
_ELEMENTWISE = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad),
    *(torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD),
)

# Their states with one value for a whole parameter; all other tensors have one for each element.
_OF_PARAMETER = ("step", "mu_product", "eta", "mu")


def require_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Check that an optimizer can step on parts of parameters."""
    if type(optimizer) not in _ELEMENTWISE:
        names = ", ".join(kind.__name__ for kind in _ELEMENTWISE)
        raise UsageError(
            f"--strategy ps cannot use the recipe's optimizer {type(optimizer).__name__}: servers "
            f"step on parts of parameters, as torch's {names} can"
        )


class TorchShard:
    """A shard whose parameters are pieces of the model's."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[torch.nn.Parameter],
        pieces: Sequence[Piece],
        flat: torch.Tensor,
        set_rate: Callable[[torch.optim.Optimizer, int], None],
    ) -> None:
        self._optimizer, self._flat, self._set_rate = optimizer, flat, set_rate
        self._pieces = [
            (piece, torch.nn.Parameter(flat.narrow(0, piece.start, piece.count)))
            for piece in pieces
        ]
        own = {id(parameters[piece.parameter]): tensor for piece, tensor in self._pieces}
        for group in optimizer.param_groups:
            group["params"] = [own[id(p)] for p in group["params"] if id(p) in own]
        self._parameters = parameters

    @property
    def weights(self) -> Flat:
        array: Flat = self._flat.numpy()
        return array

    def step(self, gradient: Flat, number: int) -> None:
        flat = torch.from_numpy(gradient)
        for piece, tensor in self._pieces:
            tensor.grad = flat.narrow(0, piece.start, piece.count)
        self._set_rate(self._optimizer, number)
        self._optimizer.step()

    def load_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the pieces' parts of the state of an optimizer of the whole parameters."""
        self._optimizer.state.clear()
        for piece, tensor in self._pieces:
            parameter = self._parameters[piece.parameter]
            for name, value in optimizer.state.get(parameter, {}).items():
                if _is_elementwise(name, value):
                    part = value.reshape(-1).narrow(0, piece.begin, piece.count)
                    value = part.to("cpu", copy=True)
                elif isinstance(value, torch.Tensor):
                    value = value.to("cpu", copy=True)
                self._optimizer.state[tensor][name] = value

    def outline(self) -> Outline:
        return [
            (
                piece,
                {
                    name: value.numpy().dtype if _is_elementwise(name, value) else value
                    for name, value in self._optimizer.state.get(tensor, {}).items()
                },
            )
            for piece, tensor in self._pieces
        ]

    def write_state(self, name: str, flat: Flat) -> None:
        memory = torch.from_numpy(flat)
        for piece, tensor in self._pieces:
            value = self._optimizer.state.get(tensor, {}).get(name)
            if _is_elementwise(name, value):
                memory.narrow(0, piece.start, piece.count).copy_(value)


def load_states(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.nn.Parameter],
    states: Sequence[State],
) -> None:
    """Overwrite the state of the optimizer of the whole parameters."""
    for parameter, state in zip(parameters, states, strict=True):
        for name, value in state.items():
            own = optimizer.state[parameter]
            if not isinstance(value, np.ndarray):
                own[name] = value
                continue
            whole = torch.from_numpy(value).view(parameter.shape)
            if name not in own:
                own[name] = torch.empty_like(
                    parameter,
                    dtype=whole.dtype,
                    memory_format=torch.contiguous_format,
                    requires_grad=False,
                )
            own[name].copy_(whole)


def _is_elementwise(name: str, value: object) -> bool:
    return isinstance(value, torch.Tensor) and name not in _OF_PARAMETER


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
        super().broadcast()
        self._row.read_weights()
        if self._rounds.shard is not None:
            self._rounds.shard.load_state(self._optimizer)

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
