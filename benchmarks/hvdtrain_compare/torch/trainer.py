"""A model in training under a strategy for torch; strategies override what they do otherwise."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hvdtrain.collective import collective
from hvdtrain.train.torch.evaluation import call_model
from hvdtrain_compare.protocol import Weights
from hvdtrain_compare.torch.division import Division, ExactDivision, PaddedDivision
from hvdtrain_compare.torch.problem import Problem


class Trainer:
    """One process that trains as a plain loop does."""

    def __init__(
        self,
        problem: Problem,
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


def padded_trainer(problem: Problem, library: str = "", **own: Any) -> Trainer:
    """Return a trainer whose processes divide samples as DistributedSampler does."""
    division = PaddedDivision(problem.place, problem.batch)
    library = library or f"torch {torch.__version__}, gloo"
    return Trainer(problem, division=division, library=library, **own)


class ExactTrainer(Trainer):
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
