"""DistributedOptimizer on a device, against one rank with the whole batch on that device."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from gpu_ranks import busy, device
from torch.nn import functional as F
from torch_batch_norm_cases import check as check_batch_norm
from torch_training import (
    Model,
    batch,
    build,
    difference,
    momentum,
    own,
    together,
    train_alone,
    train_together,
)

import hvdtrain.torch as hvd

Optimizer = torch.optim.Optimizer
CLOSE = 1e-11  # in float64; a GPU adds in another order for another batch


def equals(tensor: torch.Tensor, value: float, sent: torch.dtype | None = None) -> bool:
    """Compare all elements, but for a few roundings in the type sent: NCCL divides first."""
    few = 8 * torch.finfo(sent or tensor.dtype).eps
    return torch.allclose(tensor, torch.full_like(tensor, value), rtol=few, atol=0)


def shared(
    make: Callable[[list[torch.nn.Parameter]], Optimizer],
) -> tuple[Model, hvd.DistributedOptimizer]:
    """Return a model, equal on all ranks, and an optimizer whose work they share."""
    model = build()
    optimizer = make(list(model.parameters()))
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters(), sharded=True)


def mean_of_ranks() -> float:
    """Return the mean of 1, 2, ..., size."""
    return (hvd.size() + 1) / 2


def assert_equals_one_rank(
    model: Model,
    make: Callable[[list[torch.nn.Parameter]], Optimizer],
    steps: int,
    clip: float | None = None,
) -> None:
    """Compare weights with those of one rank that has trained on whole batches."""
    alone = build()
    train_alone(alone, make(list(alone.parameters())), steps, clip)
    far = difference(model, alone)
    assert far < CLOSE, far
    for p in model.parameters():
        assert p.device == device()
        assert p.grad is None or p.grad.device == p.device


def shared_steps_equal_one_rank() -> None:
    for make in (momentum, partial(torch.optim.Adam, lr=0.01)):
        model, optimizer = shared(make)
        train_together(model, optimizer, 3)
        optimizer.load_state_dict(optimizer.state_dict())
        for step in range(3, 5):
            inputs, labels = map(own, batch(step))
            optimizer.sample_weight = len(inputs)
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.clip_grad_norm_(1e6)
            optimizer.step()
            optimizer.zero_grad()
        assert_equals_one_rank(model, make, 5)


def equals_one_rank() -> None:
    makers: list[Callable[[Any], Optimizer]] = [momentum, partial(torch.optim.Adam, lr=0.01)]
    if device().type == "cuda":
        makers.append(partial(torch.optim.AdamW, lr=0.01, fused=True))
    for make in makers:
        for set_to_none in (True, False):
            for clip in (None, 0.05):
                model, optimizer = together(make)
                train_together(model, optimizer, 5, clip, set_to_none)
                assert_equals_one_rank(model, make, 5, clip)


def gradients_are_reduced_when_backward_returns() -> None:
    model, optimizer = together(momentum)
    for step in range(3):
        optimizer.zero_grad()
        inputs, labels = batch(step)
        optimizer.sample_weight = len(own(inputs))
        busy()
        F.cross_entropy(model(own(inputs)), own(labels)).backward()
        alone = build()
        alone.load_state_dict(model.state_dict())
        F.cross_entropy(alone(inputs), labels).backward()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            assert p.grad.stride() == p.stride()  # channels last, where the weight is
            assert torch.allclose(p.grad, q.grad, rtol=0, atol=CLOSE)
        optimizer.step()


def gradients_stay_until_the_next_backward() -> None:
    weight = torch.nn.Parameter(torch.zeros(100_000))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.0))
    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        (weight * (hvd.rank() + 1.0) * (step + 1)).sum().backward()
        busy()
        optimizer.step()
        assert weight.grad is not None
        assert equals(weight.grad, mean_of_ranks() * (step + 1)), step
        kept = weight.grad.clone()
        del kept


def weights_of_every_type() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for op, factor in ((hvd.Average, 1), (hvd.Sum, hvd.size())):
            used, unused, mine = (
                torch.nn.Parameter(torch.zeros(300, dtype=dtype)) for _ in range(3)
            )
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD([used, unused, mine], lr=1.0), op=op
            )
            for step in range(3):
                optimizer.zero_grad()
                loss = used.sum() * (hvd.rank() + 1)
                if hvd.rank() == 0:
                    loss = loss + mine.sum() * hvd.size()
                loss.backward()
                optimizer.step()
                assert equals(used, -mean_of_ranks() * factor * (step + 1)), (dtype, op, used)
                assert equals(mine, -1.0 * factor * (step + 1)), (dtype, op, mine)
                assert unused.grad is None


def a_loss_scaler_skips_on_all_ranks() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.5))
    scaler = torch.amp.GradScaler(device().type, init_scale=8.0)
    for step in range(3):
        optimizer.zero_grad()
        with torch.autocast(device().type, dtype=torch.float16):
            loss = (weight * (hvd.rank() + 1)).sum()
        if step == 1 and hvd.rank() == hvd.size() - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_([weight], 100.0)
        scaler.step(optimizer)
        scaler.update()
    assert torch.allclose(weight, torch.full((2,), 1.0 - 2 * 0.5 * mean_of_ranks()))
    assert scaler.get_scale() == 4.0


def autocast_steps(dtype: torch.dtype, model: Model, optimizer: Optimizer, whole: bool) -> float:
    """Train three steps in a half type; return the last loss."""
    scaler = torch.amp.GradScaler(device().type, enabled=dtype == torch.float16)
    for step in range(3):
        inputs, labels = batch(step) if whole else map(own, batch(step))
        if isinstance(optimizer, hvd.DistributedOptimizer):
            optimizer.sample_weight = len(inputs)
        optimizer.zero_grad()
        with torch.autocast(device().type, dtype=dtype):
            outputs = model(inputs.float())
            assert outputs.dtype == dtype
            loss = F.cross_entropy(outputs.float(), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return float(loss.detach())


def autocast() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        ours, alone = build().float(), build().float()
        optimizer = hvd.DistributedOptimizer(momentum(list(ours.parameters())))
        autocast_steps(dtype, ours, optimizer, whole=False)
        autocast_steps(dtype, alone, momentum(list(alone.parameters())), whole=True)
        far = difference(ours, alone)
        assert far < 0.02, (dtype, far)
        first = torch.cat([p.detach().flatten() for p in ours.parameters()])
        every = hvd.allgather(first[None])
        assert torch.equal(every, every[:1].expand_as(every))
        assert {p.dtype for p in ours.parameters()} == {torch.float32}


def sync_batch_norm() -> None:
    n = hvd.size()
    check_batch_norm([4] * n, 3, momentum=0.1, affine=True)
    check_batch_norm([2 + 3 * rank for rank in range(n)], 2, 3, 5, momentum=None, affine=True)
    model = Model(torch.nn.Linear(6, 4), hvd.SyncBatchNorm(4), torch.nn.Linear(4, 2)).double()
    alone = Model(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)).double()
    hvd.broadcast_parameters(model.state_dict())
    alone.load_state_dict(model.state_dict())
    optimizer = hvd.DistributedOptimizer(momentum(list(model.parameters())))
    reference = momentum(list(alone.parameters()))
    for step in range(3):
        inputs = batch(step)[0].flatten(1)[:6, :6]  # as many for each rank
        optimizer.sample_weight = len(own(inputs))
        optimizer.zero_grad()
        reference.zero_grad()
        model(own(inputs)).square().mean().backward()
        alone(inputs).square().mean().backward()
        optimizer.step()
        reference.step()
    assert difference(model, alone) < CLOSE


def forward_on_other_streams() -> None:
    if device().type != "cuda":
        return
    streams = [torch.cuda.Stream() for _ in range(2)]
    model, optimizer = together(momentum)
    for step in range(4):
        inputs, labels = map(own, batch(step))
        optimizer.sample_weight = len(inputs)
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(streams[0]):  # each layer's backward runs on its forward's stream
            optimizer.zero_grad()
            busy()
            hidden = model[:3](inputs)
        streams[1].wait_stream(streams[0])
        with torch.cuda.stream(streams[1]):
            busy()
            loss = F.cross_entropy(model[3:](hidden), labels)
        torch.cuda.current_stream().wait_stream(streams[1])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    assert_equals_one_rank(model, momentum, 4, clip=0.05)


def a_whole_step_on_another_stream() -> None:
    if device().type != "cuda":
        return
    side = torch.cuda.Stream()
    model, optimizer = together(momentum)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        train_together(model, optimizer, 3)
    torch.cuda.current_stream().wait_stream(side)
    assert_equals_one_rank(model, momentum, 3)


def models_that_are_moved_after_the_optimizer_was_made() -> None:
    model = build().cpu()
    optimizer = hvd.DistributedOptimizer(momentum(list(model.parameters())))
    train_on_cpu(model, optimizer)
    model.to(device())
    for state in optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].to(device())
    train_together(model, optimizer, 3)
    alone = build()
    reference = momentum(list(alone.parameters()))
    train_alone(alone, reference, 1)
    train_alone(alone, reference, 3)
    assert difference(model, alone) < CLOSE


def train_on_cpu(model: Model, optimizer: hvd.DistributedOptimizer) -> None:
    """Train one step in host memory."""
    inputs, labels = (own(tensor).cpu() for tensor in batch(0))
    optimizer.sample_weight = len(inputs)
    F.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
    optimizer.zero_grad()


def models_on_two_devices() -> None:
    model = build()
    model[3:].cpu()
    optimizer = hvd.DistributedOptimizer(momentum(list(model.parameters())))
    for step in range(3):
        inputs, labels = map(own, batch(step))
        optimizer.sample_weight = len(inputs)
        optimizer.zero_grad()
        outputs = model[3:](model[:3](inputs).cpu())
        F.cross_entropy(outputs, labels.cpu()).backward()
        optimizer.step()
    model.to(device())
    for parameter in model.parameters():
        parameter.grad = None
    assert_equals_one_rank(model, momentum, 3)


def what_is_not_finite_stays_so() -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    factor = math.nan if hvd.rank() == hvd.size() - 1 else 1.0
    (weight * factor).sum().backward()
    assert weight.grad is not None
    assert bool(weight.grad.isnan().all())
    optimizer.zero_grad()


def optimizers_that_are_gone_leave_no_memory() -> None:
    weight = torch.nn.Parameter(torch.zeros(1 << 20))

    def use() -> int:
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
        for _ in range(2):
            optimizer.zero_grad()
            weight.sum().backward()
            optimizer.step()
        optimizer.zero_grad()
        del optimizer
        gc.collect()
        hvd.allreduce(torch.ones(1))  # what has ended is let go by then
        return torch.cuda.memory_allocated() if device().type == "cuda" else 0

    use()
    before = use()
    for _ in range(5):
        after = use()
    assert after <= before + weight.nbytes, (before, after)
