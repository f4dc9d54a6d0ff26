"""What else may run with it: reductions in backward, Adasum, loss scalers, process sets, state."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch_training import (
    case,
    plan_of,
    refused,
)

import hvdtrain.torch as hvd
from hvdtrain.core import context
from hvdtrain.errors import MismatchError


@case
def only_the_ranks_of_a_process_set() -> None:
    if hvd.size() < 3:
        return
    pair = hvd.add_process_set([0, 2])
    weight = torch.nn.Parameter(torch.zeros(1))
    here = context.current()
    config = here.config
    if hvd.rank() == 0:  # as where a launcher has not forwarded the variable
        here.config = replace(config, bucket_bytes=4, first_bucket_bytes=4)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), process_set=pair)
    here.config = config
    if pair.included():
        plan = plan_of(optimizer)
        assert (plan.bucket_bytes, plan.first_bucket_bytes) == (4, 4)
    (weight * float(hvd.rank())).sum().backward()
    optimizer.step()
    assert weight.item() == (-1.0 if hvd.rank() in (0, 2) else -float(hvd.rank()))
    channels = len(context.current().channels())
    del optimizer
    hvd.remove_process_set(pair)
    assert len(context.current().channels()) == channels - (2 if hvd.rank() in (0, 2) else 0)


@case
def every_optimizer_gets_its_state_from_rank_0() -> None:
    for name, kind in sorted(vars(torch.optim).items()):
        plain = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
        if not plain or name in ("Optimizer", "SparseAdam"):
            continue
        weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, 6).reshape(2, 3))
        optimizer = kind([weight], lr=0.01)

        def closure(o: torch.optim.Optimizer = optimizer, w: torch.Tensor = weight) -> torch.Tensor:
            o.zero_grad()
            loss = (w**2).sum()
            loss.backward()
            return loss

        if hvd.rank() == 0:
            for _ in range(2):
                optimizer.step(closure)
            optimizer.param_groups[0]["lr"] = 0.005
        hvd.broadcast_parameters([(name, weight)])
        hvd.broadcast_optimizer_state(optimizer)
        optimizer.step(closure)
        every = hvd.allgather(weight.detach().reshape(1, -1))
        assert torch.equal(every, every[:1].expand_as(every)), name


@case
def a_model_that_differs() -> None:
    if hvd.size() == 1:
        return
    width = 5 if hvd.rank() == 1 else 4
    model = torch.nn.Linear(3, width)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    message = refused(
        MismatchError, partial(hvd.DistributedOptimizer, sgd, model.named_parameters())
    )
    assert f"[rank 1/{hvd.size()}] DistributedOptimizer: parameter 'weight'" in message
    assert "shape (5, 3), but rank 0 has (4, 3)" in message


@case
def inference_mode_is_named() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    with torch.inference_mode():
        made_there = torch.nn.Parameter(torch.zeros(2))
        sgd = torch.optim.SGD([weight], lr=1.0)
        message = refused(RuntimeError, partial(hvd.DistributedOptimizer, sgd))
    assert "outside torch.inference_mode()" in message
    sgd = torch.optim.SGD([made_there], lr=1.0)
    message = refused(RuntimeError, partial(hvd.DistributedOptimizer, sgd, [("w", made_there)]))
    assert "'w' was created in torch.inference_mode()" in message
