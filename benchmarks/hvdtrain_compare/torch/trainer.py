"""A model in training under a strategy for torch; strategies override what they do otherwise."""

from __future__ import annotations

from typing import Any

import torch

from hvdtrain.train.torch.evaluation import call_model
from hvdtrain_compare.protocol.rank_file import Weights
from hvdtrain_compare.torch.division import Division, ExactDivision
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
        """Return a copy of the weights by name; all processes call it together."""
        named = self.problem.model.named_parameters()
        return {name: parameter.detach().numpy().copy() for name, parameter in named}
