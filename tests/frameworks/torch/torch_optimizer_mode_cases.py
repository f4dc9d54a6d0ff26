"""What else may run with it: reductions in backward, Adasum, loss scalers, process sets, state."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch_training import (
    case,
    difference,
    drawn,
    lie_in_engine_memory,
    momentum,
    own,
    plan_of,
    refused,
)

import hvdtrain.torch as hvd
from hvdtrain.core import context
from hvdtrain.errors import MismatchError


def centred(x: torch.Tensor) -> torch.Tensor:
    """Return x minus the mean over the samples of all ranks."""
    sums = torch.cat([x.sum(0), x.new_tensor([len(x)])])
    sums = hvd.allreduce(sums, op=hvd.Sum, name="centre")
    return x - sums[:-1] / sums[-1]


class Centre(torch.autograd.Function):
    """A user's own operation, which communicates in the middle of both passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return centred(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return centred(gradient)


class Entangled(torch.nn.Module):
    """Has one weight in two layers, and reductions in the middle of backward.

    Args:
        norm: normalises the batch.
        centre: subtracts the mean of the batch.
        largest: returns the largest magnitude in a gradient of the batch.
    """

    def __init__(
        self,
        norm: torch.nn.Module,
        centre: Callable[[torch.Tensor], torch.Tensor],
        largest: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.norm, self.centre, self.largest = norm.double(), centre, largest
        self.first, self.inner, self.again, self.last = (
            torch.nn.Linear(*widths, dtype=torch.float64)
            for widths in ((4, 6), (6, 6), (6, 6), (6, 2))
        )
        self.again.weight = self.inner.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inner = self.norm(self.inner(self.first(inputs)))
        again = self.again(self.centre(inner).tanh())
        if again.requires_grad:
            again.register_hook(lambda gradient: gradient / self.largest(gradient))
        return self.last(again)


@case
def reductions_in_the_middle_of_backward() -> None:
    n, r = hvd.size(), hvd.rank()
    together = Entangled(
        hvd.SyncBatchNorm(6), Centre.apply, lambda g: hvd.allreduce(g.abs().max(), op=hvd.Max)
    )
    alone = Entangled(
        torch.nn.BatchNorm1d(6), lambda x: x - x.mean(0), lambda gradient: gradient.abs().max()
    )
    for number, parameter in enumerate(together.parameters()):
        pause_seconds = 0.002 * ((number + r) % n)
        parameter.register_hook(lambda _, seconds=pause_seconds: time.sleep(seconds))
    reference = momentum(list(alone.parameters()))
    optimizer = hvd.DistributedOptimizer(
        momentum(list(together.parameters())),
        together.named_parameters(remove_duplicate=False),
        op=hvd.Sum,
        groups=100,  # each gradient by itself
    )
    assert together.again.weight is together.inner.weight
    for step in range(4):
        inputs = drawn(step, 11, 4)
        for model, its_optimizer, part in (
            (together, optimizer, own(inputs)),
            (alone, reference, inputs),
        ):
            its_optimizer.zero_grad()
            ((model(part) - 1).square().sum() / 11).backward()
            its_optimizer.step()
        assert difference(together, alone) < 1e-11, (step, difference(together, alone))
    for name, buffer in alone.norm.named_buffers():
        assert torch.allclose(together.norm.get_buffer(name), buffer, rtol=1e-9), name


@case
def adasum_of_steps() -> None:
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Adasum)
    weight[hvd.rank()].backward()  # orthogonal steps add up
    optimizer.step()
    assert weight.tolist() == [-1.0] * hvd.size() + [0.0] * (4 - hvd.size())
    optimizer.zero_grad()
    weight.sum().backward()  # equal steps are averaged
    optimizer.step()
    assert weight.tolist() == [-2.0] * hvd.size() + [-1.0] * (4 - hvd.size())


@case
def skip_synchronize() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    (weight * (hvd.rank() + 1)).sum().backward()
    optimizer.synchronize()
    assert weight.grad is not None
    weight.grad *= 2
    with optimizer.skip_synchronize():
        optimizer.step()
    assert weight.item() == -(hvd.size() + 1)


@case
def a_loss_scaler_skips_on_all_ranks() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.5))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        optimizer.zero_grad()
        loss = (weight * (hvd.rank() + 1)).sum()
        if step == 1 and hvd.rank() == hvd.size() - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_([weight], 100.0)
        assert lie_in_engine_memory(optimizer, [weight])
        scaler.step(optimizer)
        scaler.update()
    mean = (hvd.size() + 1) / 2
    assert torch.allclose(weight, torch.full((2,), 1.0 - 2 * 0.5 * mean))
    assert scaler.get_scale() == 4.0


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
def optimizers_that_are_gone_leave_nothing() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    before = threading.active_count()
    for _ in range(20):
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
        weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        del optimizer
    hvd.barrier()
    assert threading.active_count() <= before + 2


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
