"""Optimizers that exchange otherwise than by the plain average, against formulas for all ranks."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from exchange_formulas import Flat
from logged import logged
from nodes import nodes_of_their_own
from one_bit import OneBit
from torch.nn import functional as F
from torch_training import (
    Model,
    batch,
    grad_of,
    gradients_of,
    momentum,
    own,
    refused,
    wrapped_sgd,
    zeros,
)

import hvdtrain.torch as hvd
from hvdtrain.core.exchanges.block_momentum import BlockMomentum
from hvdtrain.core.exchanges.catalog import make_exchange
from hvdtrain.core.gradients.exchange import AllreduceExchange, Exchange
from hvdtrain.errors import MismatchError


def dense() -> Model:
    torch.manual_seed(0)
    first, last = torch.nn.Linear(32, 20), torch.nn.Linear(20, 4)
    return Model(torch.nn.Flatten(), first, torch.nn.Tanh(), last).double()


def flat(tensors: Sequence[torch.Tensor]) -> list[Flat]:
    return [tensor.detach().cpu().reshape(-1).numpy().copy() for tensor in tensors]


def parameters(model: Model) -> list[torch.nn.Parameter]:
    return list(model.parameters())


def wrapped(model: Model, exchange: Exchange | str) -> hvd.DistributedOptimizer:
    inner = momentum(parameters(model))
    return hvd.DistributedOptimizer(inner, model.named_parameters(), exchange=exchange)


def samples(step: int, rank: int) -> float:
    return float(len(own(batch(step)[0], rank)))


def backward(model: Model, step: int, rank: int) -> None:
    inputs, labels = (own(tensor, rank) for tensor in batch(step))
    model.zero_grad()
    F.cross_entropy(model(inputs), labels).backward()


def put(values: Sequence[Flat], tensors: Sequence[torch.Tensor]) -> None:
    for value, tensor in zip(values, tensors, strict=True):
        tensor.detach().copy_(torch.from_numpy(value).reshape(tensor.shape))


def a_bucket_that_is_reduced_after_backward_is_no_change_of_its_gradients() -> None:
    """Rank 0 alone fills the second bucket in backward(), and looks at it when it is reduced."""
    if not hvd.mpi_threads_supported():
        return
    weights = [torch.nn.Parameter(torch.zeros(8)) for _ in range(2)]
    sgd = torch.optim.SGD(weights, lr=1.0)
    optimizer = hvd.DistributedOptimizer(sgd, groups=2, sharded=True)
    optimizer.sample_weight = hvd.rank() + 1  # which the engine applies to the bucket
    (weights[0] + weights[1] if hvd.rank() == 0 else weights[1]).sum().backward()
    if hvd.rank() == 0:
        gradients_of(optimizer).buckets.step.reduced[-1].result()
    optimizer.step()
    total = hvd.size() * (hvd.size() + 1) / 2
    assert torch.allclose(weights[0], torch.full((8,), -1 / total))
    assert torch.allclose(weights[1], torch.full((8,), -1.0))


def compression_is_the_exchange_of_half_types() -> None:
    for name in ("fp16", "bf16"):
        compressed, exchanged = (
            wrapped_sgd(*zeros(1, 2), **options).exchange_state()["spec"]
            for options in (
                {"compression": getattr(hvd.Compression, name)},
                {"exchange": f"half:type={name}"},
            )
        )
        assert compressed == exchanged, name


def ranks_that_exchange_in_different_ways_are_refused() -> None:
    if hvd.size() == 1:
        return
    for given in (OneBit(hierarchical=False), OneBit(hierarchical=True)):

        def step(given: OneBit = given) -> None:
            wrapped(dense(), given if hvd.rank() == 0 else AllreduceExchange()).step()

        message = refused(MismatchError, step)
        assert "exchange onebit" in message, message
        assert "exchange allreduce:op=average" in message, message


def a_state_of_another_exchange_is_refused() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    local = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), exchange="local:steps=2")
    weight.sum().backward()
    local.step()
    local.flush()
    saved = local.exchange_state()
    assert saved["steps"] == 1
    message = refused(ValueError, partial(local.load_exchange_state, {**saved, "spec": "nbit"}))
    assert "the state belongs to exchange 'nbit'" in message, message


def what_does_not_go_together_is_refused() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    sgd = torch.optim.SGD([weight], lr=1.0)
    wrong: Any = 1
    wrap = partial(hvd.DistributedOptimizer, sgd)
    assert "must be an Exchange or text, got int" in refused(
        TypeError, partial(wrap, exchange=wrong)
    )
    for beside in (
        {"op": hvd.Sum},
        {"op": hvd.Adasum},
        {"gradient_predivide_factor": 2.0},
        {"compression": hvd.Compression.fp16},
    ):
        wrong = beside
        assert "says itself" in refused(ValueError, partial(wrap, exchange=OneBit(), **wrong))
    local = wrap(exchange=BlockMomentum(steps=2))
    assert "cannot be skipped" in refused(AssertionError, local.skip_synchronize().__enter__)
    weight.sum().backward()
    local.step()  # the first of two
    group = {"params": [torch.nn.Parameter(torch.zeros(2))]}
    assert "call flush()" in refused(RuntimeError, partial(local.add_param_group, group))
    assert "call flush()" in refused(RuntimeError, local.exchange_state)
    local.flush()
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))], lr=1.0)
    make = partial(hvd.DistributedOptimizer, other, exchange=OneBit())
    assert "is complex64" in refused(ValueError, make)


def what_codes_cannot_hold_does_not_stay() -> None:
    """The squares of finite gradients overflow while they are coded."""
    exchange = make_exchange("nbit:bits=2,block=8")
    exchange.hierarchical = False
    weight = torch.nn.Parameter(torch.zeros(16, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.0), exchange=exchange)
    for scale in (1.0, 1e200, 1.0):
        optimizer.zero_grad()
        (weight * torch.arange(16) * scale * (1 + hvd.rank())).sum().backward()
        optimizer.step()
        assert bool(grad_of(weight).isfinite().all()) == (scale == 1.0 or hvd.size() == 1), scale


def codes_of_weights_keep_what_they_lose() -> None:
    """It is added to what ranks send in the next exchange."""
    exchange = make_exchange("diloco:steps=1,type=int8")
    exchange.hierarchical = False  # each rank counts as a node
    weight = torch.nn.Parameter(torch.zeros(1024))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), exchange=exchange)
    for _ in range(2):
        optimizer.zero_grad()
        (weight * torch.arange(1024).sin() * (1 + hvd.rank())).sum().backward()
        optimizer.step()
    kept = [array for name, array in exchange.state().own.items() if "residual" in name]
    assert any(array.any() for array in kept) == (hvd.size() > 1), kept


def trained(exchange: str) -> torch.Tensor:
    model = dense()
    optimizer = wrapped(model, exchange)
    for step in range(3):
        backward(model, step, hvd.rank())
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def ranks_of_a_node_compress_if_told_to() -> None:
    """As ranks on nodes of their own do, bit by bit; else they average, and it is said."""
    one_node, plain = hvd.local_size() == hvd.size(), trained("average")
    for text in ("nbit:bits=1,block=16", "powersgd:rank=1,min_rate=0.1", "topk:ratio=0.25"):
        ends: list[torch.Tensor] = []
        told = logged(lambda text=text, ends=ends: ends.append(trained(text)))  # type: ignore[misc]
        assert len(told) == (one_node and hvd.rank() == 0 < hvd.size() - 1), told
        assert all("compresses nothing on one node; with per_rank=true" in line for line in told)
        assert torch.allclose(ends[0], plain, rtol=0, atol=1e-12) == one_node
        compressed = trained(f"{text},per_rank=true")
        assert torch.equal(compressed, plain) == (hvd.size() == 1)
        with nodes_of_their_own():
            assert torch.equal(compressed, trained(text))
