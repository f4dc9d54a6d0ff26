"""Optimizers with compressed gradients."""

from __future__ import annotations

import torch
from torch.nn import functional as F
from torch_exchange_cases import backward, dense, parameters, samples, wrapped
from torch_training import Model, batch, case, difference, momentum

import hvdtrain.torch as hvd
from hvdtrain.core import context
from hvdtrain.core.exchanges.catalog import make_exchange
from hvdtrain.core.objects import allgather_object


def average(model: Model, step: int) -> None:
    """Compute the average of all ranks' samples."""
    inputs, labels = batch(step)
    model.zero_grad()
    F.cross_entropy(model(inputs), labels).backward()


@case
def compressed_gradients_train_all_ranks_alike() -> None:
    """With ranks as nodes of their own nothing is lost; on one node it is the average."""
    if torch.get_default_device().type != "cpu":
        return
    own_nodes = allgather_object(context.current().topology.node, "nodes")
    for text in ("nbit:bits=2,block=64", "powersgd:rank=2,min_rate=0.5", "topk:ratio=0.1,warmup=1"):
        model, alone = dense(), dense()
        exchange = make_exchange(text)
        exchange.hierarchical = False
        optimizer, plain = (wrapped(each, how) for each, how in ((model, exchange), (alone, text)))
        for step in range(4):
            for each, its_optimizer in ((model, optimizer), (alone, plain)):
                its_optimizer.sample_weight = samples(step, hvd.rank())
                backward(each, step, hvd.rank())
                its_optimizer.step()
        for each in (model, alone):
            weights = allgather_object([p.detach().cpu() for p in each.parameters()], "weights")
            assert all(
                torch.equal(one, other) for one, other in zip(weights[0], weights[-1], strict=True)
            )
        if len(set(own_nodes)) == 1:
            serial = dense()
            inner = momentum(parameters(serial))
            for step in range(4):
                average(serial, step)
                inner.step()
            assert difference(alone, serial) < 1e-12, text
            assert (difference(model, serial) > 1e-6) == (hvd.size() > 1), text


@case
def what_codes_cannot_hold_does_not_stay() -> None:
    """The squares of finite gradients overflow while they are coded."""
    exchange = make_exchange("nbit:bits=8,block=8")
    exchange.hierarchical = False
    weight = torch.nn.Parameter(torch.zeros(16, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.0), exchange=exchange)
    for scale in (1.0, 1e200, 1.0):
        optimizer.zero_grad()
        (weight * torch.arange(16) * scale * (1 + hvd.rank())).sum().backward()
        optimizer.step()
        assert weight.grad is not None
        assert bool(weight.grad.isfinite().all()) == (scale == 1.0 or hvd.size() == 1), scale
