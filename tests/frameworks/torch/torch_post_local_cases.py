"""Optimizers that average gradients first and weights later, against all ranks on one process."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch_exchange_cases import dense, flat, gradients, parameters, wrapped
from torch_local_cases import Alone, check_equal, take_step
from torch_training import difference, momentum

import hvdtrain.torch as hvd
from hvdtrain.core.exchanges.catalog import make_exchange


def set_rate(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Let the learning rate rise, and fall once, in the fourth step."""
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
