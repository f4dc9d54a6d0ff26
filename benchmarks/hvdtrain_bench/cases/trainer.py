"""A training step with one library, which starts from the same weights in every turn."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from hvdtrain_bench.cases.models import BenchModel

# Returns the module to call and the optimizer to step, for a model.
Wrap = Callable[[nn.Module], tuple[nn.Module, Optimizer]]

_SEED = 1
_PIECE = 1 << 20


def first_weights(model: BenchModel) -> list[torch.Tensor]:
    """Return the weights with which every trainer starts, equal on all ranks."""
    torch.manual_seed(_SEED)
    return [parameter.detach().clone() for parameter in model.build().parameters()]


def bare(module: nn.Module) -> tuple[nn.Module, Optimizer]:
    """Return the model and its optimizer for training without communication."""
    return module, bare_optimizer(module)


def bare_optimizer(module: nn.Module, kind: str = "sgd", fused: bool | None = None) -> Optimizer:
    """Return the optimizer of every contender."""
    if kind == "adam":
        return Adam(module.parameters(), lr=1e-4, fused=fused)
    return SGD(module.parameters(), lr=0.01, momentum=0.9, fused=fused)


class Trainer:
    """A model with an optimizer, and the batch of every step."""

    module: nn.Module
    optimizer: Optimizer

    def __init__(
        self,
        model: BenchModel,
        weights: list[torch.Tensor],
        batch: tuple[torch.Tensor, torch.Tensor],
        wrap: Wrap,
        seed: int,
    ) -> None:
        self._model, self._weights, self._seed = model, weights, seed
        self._inputs, self._targets = batch
        self._wrap = wrap  # adds the library, when the first turn begins
        self.parameters: list[nn.Parameter] = []  # none before the first restart

    def restart(self) -> None:
        """Restore the first weights, with a new optimizer."""
        if not self.parameters:
            self.module, self.optimizer = self._wrap(self._model.build())
            # torch's replicate makes DTensors, each of them whole on every rank.
            weights = self.module.parameters()
            self.parameters = [getattr(weight, "_local_tensor", weight) for weight in weights]
        with torch.no_grad():
            for parameter, weight in zip(self.parameters, self._weights, strict=True):
                parameter.copy_(weight)
        self.optimizer.state.clear()
        torch.manual_seed(self._seed)

    def loss(self) -> torch.Tensor:
        """Return the loss of the batch."""
        return self._model.loss(self.module(self._inputs), self._targets)

    def step(self, between: Callable[[], object] = int) -> None:
        """Train one step; call a function before the optimizer takes it."""
        self.optimizer.zero_grad()
        self.loss().backward()
        between()
        self.optimizer.step()

    def moved(self) -> float:
        """Return sum |w - w_0| over all weights: the distance that training has moved them.

        Gradients are freed, so that those of the next contender may lie in their memory.
        """
        total = 0.0
        for parameter, weight in zip(self.parameters, self._weights, strict=True):
            parameter.grad = None
            now, then = parameter.detach().view(-1), weight.view(-1)
            for start in range(0, now.numel(), _PIECE):
                piece = slice(start, start + _PIECE)
                total += float((now[piece].double() - then[piece].double()).abs().sum())
        return total
