"""Loops, steps and operations that torch.compile compiles, and backward passes that it compiles."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import hvdtrain.torch as hvd

Step = Callable[[torch.Tensor], object]


def _whole(weights: list[torch.nn.Parameter], optimizer: hvd.DistributedOptimizer) -> Step:
    @torch.compile(backend="eager")
    def step(scale: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        (weights[0] * scale).sum().backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(weights, 1e9)
        with optimizer.skip_synchronize():
            optimizer.step()
        summed: torch.Tensor = hvd.synchronize(hvd.allreduce_async(scale, op=hvd.Sum))
        assert summed.tolist() == [hvd.size() * (hvd.size() + 1) / 2]
        return hvd.allreduce(scale)

    return step


def _step_alone(weights: list[torch.nn.Parameter], optimizer: hvd.DistributedOptimizer) -> Step:
    compiled = torch.compile(optimizer.step, backend="eager")

    def step(scale: torch.Tensor) -> object:
        optimizer.zero_grad()
        (weights[0] * scale).sum().backward()
        return compiled()

    return step


def _backward(
    used: int, weights: list[torch.nn.Parameter], optimizer: hvd.DistributedOptimizer
) -> Step:
    @torch.compile(backend="eager")
    def loss_of(scale: torch.Tensor) -> torch.Tensor:
        loss = torch.cat(tuple(weights[:used])).sum() * scale
        loss.backward()
        return loss

    def step(scale: torch.Tensor) -> object:
        optimizer.zero_grad()
        with torch._dynamo.config.patch(compiled_autograd=True):
            loss_of(scale)
        if used == len(weights):
            mean = (hvd.size() + 1) / 2
            assert [weight.grad.tolist() for weight in weights if weight.grad is not None] == [
                [mean] * 2,
                [mean] * 2,
            ]
        return optimizer.step()

    return step


def compiled_steps() -> None:
    if hvd.size() != 2:  # takes seconds, and does not depend on the number of ranks
        return
    makers: list[Any] = [_whole, _step_alone, partial(_backward, 1), partial(_backward, 2)]
    for make in makers:
        weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
        step = make(weights, hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0)))
        for _ in range(2):
            with warnings.catch_warnings(action="ignore"):  # of the compiler's own
                step(torch.tensor([hvd.rank() + 1.0]))
        assert weights[0].tolist() == [-(hvd.size() + 1.0)] * 2, make
