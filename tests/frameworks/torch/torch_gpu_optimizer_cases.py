"""DistributedOptimizer on a device, against one rank with the whole batch on that device."""

import gc
import math
from functools import partial
from itertools import product
from typing import Any

import torch
import torch_training as training
from gpu_ranks import busy, device
from torch.nn import functional as F
from torch_batch_norm_cases import check as check_batch_norm

import hvdtrain.torch as hvd

CLOSE = 1e-11  # in float64; a GPU adds in another order for another batch


def equals(tensor: torch.Tensor, value: float, sent: torch.dtype | None = None) -> bool:
    """Compare all elements, but for a few roundings in the type sent: NCCL divides first."""
    few = 8 * torch.finfo(sent or tensor.dtype).eps
    return torch.allclose(tensor, torch.full_like(tensor, value), rtol=few, atol=0)


def assert_equals_one_rank(
    model: training.Model, make: training.Make, steps: int, clip: float | None = None
) -> None:
    training.check_equals_alone(model, make, steps, CLOSE, clip)
    for p in model.parameters():
        assert p.device == device()
        assert p.grad is None or p.grad.device == p.device


def backward(
    model: training.Model, optimizer: hvd.DistributedOptimizer, step: int, forward: Any = None
) -> None:
    inputs, labels = map(training.own, training.batch(step))
    optimizer.sample_weight = len(inputs)
    outputs = (forward or model)(inputs)
    F.cross_entropy(outputs, labels.to(outputs.device)).backward()


def shared_steps_equal_one_rank() -> None:
    for make in (training.momentum, partial(torch.optim.Adam, lr=0.01)):
        model, optimizer = training.together(make, sharded=True)
        training.train_together(model, optimizer, 3)
        optimizer.load_state_dict(optimizer.state_dict())
        for step in range(3, 5):
            optimizer.zero_grad()
            backward(model, optimizer, step)
            optimizer.clip_grad_norm_(1e6)
            optimizer.step()
        optimizer.zero_grad()
        assert_equals_one_rank(model, make, 5)


def equals_one_rank() -> None:
    makers: list[training.Make] = [training.momentum, partial(torch.optim.Adam, lr=0.01)]
    if device().type == "cuda":
        makers.append(partial(torch.optim.AdamW, lr=0.01, fused=True))
    for make, set_to_none, clip in product(makers, (True, False), (None, 0.05)):
        model, optimizer = training.together(make)
        training.train_together(model, optimizer, 5, clip, set_to_none)
        assert_equals_one_rank(model, make, 5, clip)


def gradients_are_reduced_when_backward_returns() -> None:
    model, optimizer = training.together(training.momentum)
    for step in range(3):
        optimizer.zero_grad()
        inputs, labels = training.batch(step)
        optimizer.sample_weight = len(training.own(inputs))
        busy()
        F.cross_entropy(model(training.own(inputs)), training.own(labels)).backward()
        alone = training.build()
        alone.load_state_dict(model.state_dict())
        F.cross_entropy(alone(inputs), labels).backward()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            assert training.grad_of(p).stride() == p.stride()  # channels last, where the weight is
            assert torch.allclose(training.grad_of(p), training.grad_of(q), rtol=0, atol=CLOSE)
        optimizer.step()


def gradients_stay_until_the_next_backward() -> None:
    weight = torch.nn.Parameter(torch.zeros(100_000))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.0))
    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        (weight * (hvd.rank() + 1.0) * (step + 1)).sum().backward()
        busy()
        optimizer.step()
        assert equals(training.grad_of(weight), training.mean_of_ranks() * (step + 1)), step
        kept = training.grad_of(weight).clone()
        del kept


def weights_of_every_type() -> None:
    types = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    for dtype, (op, factor) in product(types, ((hvd.Average, 1), (hvd.Sum, hvd.size()))):
        used, unused, mine = weights = training.zeros(3, 300, dtype=dtype)
        optimizer = training.wrapped_sgd(*weights, op=op)
        for step in range(3):
            optimizer.zero_grad()
            loss = used.sum() * (hvd.rank() + 1)
            if hvd.rank() == 0:
                loss = loss + mine.sum() * hvd.size()
            loss.backward()
            optimizer.step()
            assert equals(used, -training.mean_of_ranks() * factor * (step + 1)), (dtype, op, used)
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
    assert torch.allclose(weight, torch.full((2,), 1.0 - 2 * 0.5 * training.mean_of_ranks()))
    assert scaler.get_scale() == 4.0


def sync_batch_norm() -> None:
    n = hvd.size()
    check_batch_norm([4] * n, 3, momentum=0.1, affine=True)
    check_batch_norm([2 + 3 * rank for rank in range(n)], 2, 3, 5, momentum=None, affine=True)


def forward_on_other_streams() -> None:
    if device().type != "cuda":
        return
    streams = [torch.cuda.Stream() for _ in range(2)]
    model, optimizer = training.together(training.momentum)
    for step in range(4):
        inputs, labels = map(training.own, training.batch(step))
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
    assert_equals_one_rank(model, training.momentum, 4, clip=0.05)


def a_whole_step_on_another_stream() -> None:
    if device().type != "cuda":
        return
    side = torch.cuda.Stream()
    model, optimizer = training.together(training.momentum)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        training.train_together(model, optimizer, 3)
    torch.cuda.current_stream().wait_stream(side)
    assert_equals_one_rank(model, training.momentum, 3)


def models_that_are_moved_after_the_optimizer_was_made() -> None:
    model = training.build().cpu()
    optimizer = hvd.DistributedOptimizer(training.momentum(list(model.parameters())))
    with torch.device("cpu"):
        training.train_together(model, optimizer, 1)
    optimizer.zero_grad()
    model.to(device())
    for state in optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].to(device())
    training.train_together(model, optimizer, 3)
    alone = training.build()
    reference = training.momentum(list(alone.parameters()))
    training.train_alone(alone, reference, 1)
    training.train_alone(alone, reference, 3)
    assert training.difference(model, alone) < CLOSE


def models_on_two_devices() -> None:
    model = training.build()
    model[3:].cpu()
    optimizer = hvd.DistributedOptimizer(training.momentum(list(model.parameters())))
    for step in range(3):
        optimizer.zero_grad()
        backward(model, optimizer, step, lambda x: model[3:](model[:3](x).cpu()))
        optimizer.step()
    model.to(device())
    optimizer.zero_grad()
    assert_equals_one_rank(model, training.momentum, 3)


def what_is_not_finite_stays_so() -> None:
    (weight,) = training.zeros(1, 3)
    optimizer = training.wrapped_sgd(weight)
    (weight * (math.nan if hvd.rank() == hvd.size() - 1 else 1.0)).sum().backward()
    assert bool(training.grad_of(weight).isnan().all())
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
