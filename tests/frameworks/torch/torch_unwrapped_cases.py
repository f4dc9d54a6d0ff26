"""Loops in which each rank trains a model of its own are warned of, and no others."""

from functools import partial

import torch
from logged import WEIGHTS_DIFFER, logged
from torch_training import build, momentum, train_together, warned

import hvdtrain.torch as hvd


def _weights() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]


def _train(
    weights: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, average: bool = False
) -> None:
    for _ in range(130):
        optimizer.zero_grad()
        (weights[0] + weights[1]).sum().backward()
        if average:
            hvd.grouped_allreduce_([w.grad for w in weights if w.grad is not None])
        optimizer.step()


def _alone(average: bool = False, broadcast: bool = True) -> None:
    weights = _weights()
    if broadcast:
        hvd.broadcast_parameters(weights)
    _train(weights, torch.optim.SGD(weights, lr=0.1), average)
    hvd.allreduce(torch.tensor(1.0))  # of the loss


def _on_rank_0_after_all(wrap_first: bool) -> None:
    weights = _weights()
    if not wrap_first:
        hvd.broadcast_parameters(weights)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights[:1], lr=0.1))
    optimizer.add_param_group({"params": weights[1:]})
    if wrap_first:
        hvd.broadcast_parameters(weights)
    _train(weights, optimizer)
    del optimizer
    if hvd.rank() == 0:
        _train(weights, torch.optim.Adam(weights))


def _after_shutdown() -> None:
    weights = _weights()
    hvd.broadcast_parameters(weights)
    hvd.shutdown()
    _train(weights, torch.optim.SGD(weights, lr=0.1))
    hvd.init()


def loops_that_wrap_nothing() -> None:
    _alone(average=True)
    _alone(broadcast=False)
    _on_rank_0_after_all(wrap_first=False)
    _on_rank_0_after_all(wrap_first=True)
    _after_shutdown()
    if hvd.rank() == 0 and hvd.size() > 1:
        text = warned(UserWarning, _alone)
        assert "SGD took 100 steps" in text
        assert "if each rank is to train the same model, wrap the optimizer" in text
    else:
        _alone()
    _alone(broadcast=False)


def _train_wrapped(seed: int = 0, faster: int = 0) -> None:
    model = build(seed)
    optimizer = hvd.DistributedOptimizer(momentum(list(model.parameters())))
    optimizer.param_groups[0]["lr"] *= 1 + faster
    train_together(model, optimizer, steps=5)


def weights_that_differ_in_wrapped_loops() -> None:
    others = hvd.size() > 1 and hvd.rank() == 0
    assert logged(_train_wrapped) == []
    for train in (partial(_train_wrapped, hvd.rank()), partial(_train_wrapped, 0, hvd.rank())):
        said = logged(train)
        assert len(said) == others, said  # once, not in steps 2, 3 and 5
        assert all(f"{WEIGHTS_DIFFER} at step 2" in line and "of rank" in line for line in said), (
            said
        )


def _train_two() -> None:
    """Step two optimizers of one backward pass, in an order of each rank's own."""
    values = torch.full((4,), complex(hvd.rank(), 1.0), dtype=torch.complex128)
    weights = [torch.nn.Parameter(values.conj()), torch.nn.Parameter(values.real)]
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD([each], lr=0.1)) for each in weights]
    if hvd.rank() == 1:  # counts otherwise than the other ranks
        optimizers[0].load_exchange_state({**optimizers[0].exchange_state(), "steps": 4})
    for _ in range(4):
        (weights[0].abs().sum() + weights[1].sum()).backward()
        for optimizer in optimizers if hvd.rank() else reversed(optimizers):
            optimizer.step()
            optimizer.zero_grad()


def weights_that_differ_in_optimizers_of_another_order() -> None:
    said = logged(_train_two)
    assert len(said) == (2 if hvd.size() > 1 and hvd.rank() == 0 else 0), said


def _train_normalized(make: type[torch.nn.modules.batchnorm._BatchNorm]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), make(2))
    if make is torch.nn.BatchNorm1d:
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    for _ in range(2):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))


def layers_of_another_distribution() -> None:
    """Once, on rank 0, where there are others."""
    for make in (torch.nn.SyncBatchNorm, hvd.SyncBatchNorm, torch.nn.BatchNorm1d):
        said = logged(partial(_train_normalized, make))
        expected = make is not hvd.SyncBatchNorm and hvd.size() > 1 and hvd.rank() == 0
        assert len(said) == expected, said
        assert all("use hvd.SyncBatchNorm" in line for line in said), said
