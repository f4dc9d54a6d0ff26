"""Optimizers that exchange weights after local steps, against all ranks on one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from exchange_formulas import mean
from torch_exchange_cases import backward, dense, flat, parameters, put, samples, wrapped
from torch_training import Model, case, difference, momentum

import hvdtrain.torch as hvd
from hvdtrain.core.exchanges.catalog import make_exchange

Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


class Alone:
    """All ranks on this process, which average weights when they are told to.

    Args:
        make: function that returns the optimizer of a rank.
    """

    def __init__(self, make: Make) -> None:
        self.models = [dense() for _ in range(hvd.size())]
        self.optimizers = [make(parameters(model)) for model in self.models]
        self.samples = [0.0] * hvd.size()

    @property
    def own(self) -> Model:
        """The model of this rank."""
        return self.models[hvd.rank()]

    def step(self, step: int, ranks: Sequence[int] | None = None) -> None:
        """Let ranks, or all, take a step by themselves."""
        for rank in range(hvd.size()) if ranks is None else ranks:
            backward(self.models[rank], step, rank)
            self.optimizers[rank].step()
            self.samples[rank] += samples(step, rank)

    def average(self) -> None:
        """Give all ranks the average of their weights."""
        result = mean([flat(parameters(model)) for model in self.models], self.samples)
        for model in self.models:
            put(result, parameters(model))
        self.samples = [0.0] * hvd.size()


def sgd(own: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD without a state."""
    return torch.optim.SGD(own, lr=0.1)


def take_step(model: Model, optimizer: hvd.DistributedOptimizer, step: int) -> None:
    """Train on this rank's share of a batch."""
    optimizer.sample_weight = samples(step, hvd.rank())
    backward(model, step, hvd.rank())
    optimizer.step()


def check_equal(model: Model) -> None:
    """Check that all ranks have the same bits."""
    whole = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    gathered = hvd.allgather(whole.reshape(1, -1), name="weights")
    assert all(torch.equal(gathered[0], other) for other in gathered)


@case
def weights_averaged_after_each_step_are_those_of_averaged_gradients() -> None:
    one, other = dense(), dense()
    local = hvd.DistributedOptimizer(sgd(parameters(one)), exchange="local:steps=1")
    plain = hvd.DistributedOptimizer(sgd(parameters(other)))
    for step in range(4):
        take_step(one, local, step)
        take_step(other, plain, step)
        assert local.synchronized
        assert plain.synchronized
        assert difference(one, other) < 1e-12
    check_equal(one)


@case
def ranks_average_weights_every_few_steps() -> None:
    for state in ("keep", "reset"):
        model, alone = dense(), Alone(momentum)
        optimizer = wrapped(model, make_exchange(f"local:steps=3,state={state}"))
        for step in range(7):
            take_step(model, optimizer, step)
            alone.step(step)
            assert optimizer.synchronized == (step in (2, 5))
            if optimizer.synchronized:
                alone.average()
                check_equal(model)
                if state == "reset":
                    alone.optimizers = [momentum(parameters(each)) for each in alone.models]
            assert difference(model, alone.own) < 1e-12, (state, step)
        optimizer.flush()
        alone.average()
        check_equal(model)
        assert difference(model, alone.own) < 1e-12, state


@case
def a_flush_of_equal_weights_changes_nothing() -> None:
    for exchange in ("average", "adasum", "local:steps=2", "local:steps=9,warmup=2"):
        model = dense()
        optimizer = wrapped(model, make_exchange(exchange))
        optimizer.flush()
        for step in range(2):
            take_step(model, optimizer, step)
        assert optimizer.synchronized
        before = flat(parameters(model))
        optimizer.flush()
        assert all((a == b).all() for a, b in zip(flat(parameters(model)), before, strict=True))


@case
def a_flush_waits_for_ranks_that_take_more_steps() -> None:
    """Rank 0 takes five steps, the others two: they join in its second average."""
    model, alone = dense(), Alone(momentum)
    optimizer = wrapped(model, make_exchange("local:steps=2"))
    for step in range(5 if hvd.rank() == 0 else 2):
        take_step(model, optimizer, step)
    for step in range(5):
        alone.step(step, None if step < 2 else [0])
        if step % 2:
            alone.average()
    optimizer.flush()
    alone.average()
    check_equal(model)
    assert difference(model, alone.own) < 1e-12
