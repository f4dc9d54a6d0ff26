"""Optimizers that average weights, at once or after gradients, against ranks on one process."""

from collections.abc import Sequence
from copy import deepcopy
from itertools import product

import torch
from exchange_formulas import Flat, OfRanks, mean
from torch_exchange_cases import backward, dense, flat, parameters, put, samples, wrapped
from torch_training import Make, Model, check_equal, difference, gradients, momentum, refused

import hvdtrain.torch as hvd
from hvdtrain.core.exchanges.catalog import make_exchange


class Alone:
    """All ranks on this process, which average weights when they are told to."""

    def __init__(self, make: Make) -> None:
        self._make = make
        self.models = [dense() for _ in range(hvd.size())]
        self.forget()
        self.samples = [0.0] * hvd.size()

    @property
    def own(self) -> Model:
        return self.models[hvd.rank()]

    def step(self, step: int, ranks: Sequence[int] | None = None) -> None:
        for rank in range(hvd.size()) if ranks is None else ranks:
            backward(self.models[rank], step, rank)
            self.optimizers[rank].step()
            self.samples[rank] += samples(step, rank)

    def weights(self) -> OfRanks:
        return [flat(parameters(model)) for model in self.models]

    def put(self, weights: Sequence[Flat]) -> None:
        for model in self.models:
            put(weights, parameters(model))
        self.samples = [0.0] * hvd.size()

    def average(self) -> None:
        self.put(mean(self.weights(), self.samples))

    def average_states(self) -> None:
        total = sum(self.samples)
        for parts in zip(*map(parameters, self.models), strict=True):
            states = [own.state[p] for own, p in zip(self.optimizers, parts, strict=True)]
            for name in states[0].keys() - {"step"}:
                pairs = zip(states, self.samples, strict=True)
                average = sum(state[name] * count / total for state, count in pairs)
                for state in states:
                    state[name].copy_(average)

    def forget(self) -> None:
        self.optimizers = [self._make(parameters(model)) for model in self.models]


def adam(own: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(own, lr=0.01)


def take_step(model: Model, optimizer: hvd.DistributedOptimizer, step: int) -> None:
    optimizer.sample_weight = samples(step, hvd.rank())
    backward(model, step, hvd.rank())
    optimizer.step()


def ranks_average_weights_every_few_steps() -> None:
    for state, make in product(("keep", "average", "reset"), (momentum, adam)):
        model, alone = dense(), Alone(make)
        exchange = make_exchange(f"local:steps=3,state={state}")
        optimizer = hvd.DistributedOptimizer(make(parameters(model)), exchange=exchange)
        for step in range(7):
            take_step(model, optimizer, step)
            alone.step(step)
            assert optimizer.synchronized == (step in (2, 5))
            if optimizer.synchronized:
                if state == "average":
                    alone.average_states()
                alone.average()
                check_equal(model.parameters())
                if state == "reset":
                    alone.forget()
            assert difference(model, alone.own) < 1e-11, (state, step)
        optimizer.flush()
        alone.average()
        check_equal(model.parameters())
        if state == "average":
            check_equal(
                value
                for each in optimizer.state.values()
                for name, value in each.items()
                if name != "step"
            )
        assert difference(model, alone.own) < 1e-11, state


def a_rank_without_a_state_has_no_part_in_its_average() -> None:
    """Rank 0 takes two steps and the others none, so the average is that of rank 0."""
    model, alone = dense(), Alone(momentum)
    optimizer = wrapped(model, make_exchange("local:steps=4,state=average"))
    for step in range(2 if hvd.rank() == 0 else 0):
        take_step(model, optimizer, step)
    for step in range(2):
        alone.step(step, [0])
    optimizer.flush()
    alone.average()
    check_equal(model.parameters())
    assert difference(model, alone.own) < 1e-12
    if hvd.rank() == 0:
        own, theirs = optimizer.state, alone.optimizers[0].state
        for one, other in zip(own.values(), theirs.values(), strict=True):
            assert float((one["momentum_buffer"] - other["momentum_buffer"]).abs().max()) < 1e-12
    else:
        assert not optimizer.state


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
    check_equal(model.parameters())
    assert difference(model, alone.own) < 1e-12


def blocks_count_samples_that_are_known() -> None:
    model = dense()
    optimizer = wrapped(model, make_exchange("blockmomentum:block=22"))
    backward(model, 0, hvd.rank())
    assert "set optimizer.sample_weight" in refused(ValueError, optimizer.step)


def set_rate(optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.param_groups[0]["lr"] = (0.1, 0.1, 0.2, 0.1)[min(step, 3)]


def gradients_are_averaged_before_weights() -> None:
    """The first four steps are those of averaged gradients; then ranks drift, two steps each."""
    for after in ("4", "rate"):
        model, plain_model = dense(), dense()
        optimizer = wrapped(model, make_exchange(f"postlocal:after={after},steps=2"))
        early = optimizer.exchange_state()
        plain = hvd.DistributedOptimizer(momentum(parameters(plain_model)))
        for step in range(4):
            assert not optimizer.exchanges_weights
            for each, its_model in ((optimizer, model), (plain, plain_model)):
                set_rate(each, step)
                take_step(its_model, each, step)
            assert difference(model, plain_model) == 0.0, step
        assert optimizer.exchanges_weights
        kept = [gradient.clone() for gradient in gradients(model)]
        alone = Alone(momentum)
        alone.put(flat(parameters(model)))
        for own in alone.optimizers:
            own.load_state_dict(deepcopy(plain.state_dict()))
        for step in range(4, 7):
            assert all(torch.equal(a, b) for a, b in zip(kept, gradients(model), strict=True))
            take_step(model, optimizer, step)
            alone.step(step)
            if step == 5:
                assert optimizer.synchronized
                alone.average()
            assert difference(model, alone.own) < 1e-12, step
            kept = [gradient.clone() for gradient in gradients(model)]
        optimizer.flush()
        check_equal(model.parameters())
        optimizer.load_exchange_state(early)
        assert not optimizer.exchanges_weights
        take_step(model, optimizer, 0)
        check_equal(gradients(model))


def a_switch_waits_for_a_rank_that_has_joined() -> None:
    """Afterwards ranks that have taken different numbers of steps change over together."""
    model, leaves = dense(), hvd.rank() == hvd.size() - 1 > 0
    for after in (2, 5):
        optimizer = wrapped(model, make_exchange(f"postlocal:after={after},steps=2"))
        for step in range(1 if leaves else 3):
            take_step(model, optimizer, step)
        hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert not optimizer.exchanges_weights or hvd.size() == 1
        for step in range(3, 6):
            take_step(model, optimizer, step)
        assert optimizer.exchanges_weights
        optimizer.flush()
        check_equal(model.parameters())
