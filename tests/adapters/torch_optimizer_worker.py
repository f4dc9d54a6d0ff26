"""DistributedOptimizer on each rank, against one process with the whole batch."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ranks import report
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hvdtrain.torch as hvd
from hvdtrain.core import context
from hvdtrain.core.plan import Plan
from hvdtrain.errors import MismatchError

Model = torch.nn.Sequential
CASES: list[Callable[[], None]] = []


def case(function: Callable[[], None]) -> Callable[[], None]:
    """Add a function to the table."""
    CASES.append(function)
    return function


def build(seed: int = 0, memory_format: torch.memory_format = torch.channels_last) -> Model:
    """Return a small network in float64, by default with a channels-last convolution."""
    torch.manual_seed(seed)
    convolution = torch.nn.Conv2d(2, 3, 3, padding=1)
    convolution.weight.data = convolution.weight.data.contiguous(memory_format=memory_format)
    model = Model(
        convolution,
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(48, 20),
        torch.nn.Tanh(),
        torch.nn.Linear(20, 4),
    )
    return model.double()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the whole batch of a step: 11 samples, which divides by no size above 1."""
    generator = torch.Generator().manual_seed(100 + step)
    inputs = torch.randn(11, 2, 4, 4, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 4, (11,), generator=generator)


def own(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's uneven share of a batch."""
    return tensor[hvd.rank() :: hvd.size()]


def difference(a: torch.nn.Module, b: torch.nn.Module) -> float:
    """Return the largest difference between the weights of two models."""
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max(float((p - q).detach().abs().max()) for p, q in pairs)


def plan_of(optimizer: hvd.DistributedOptimizer) -> Plan:
    """Return how an optimizer's gradients are cut into buckets."""
    assert optimizer._gradients is not None
    return optimizer._gradients._plan


def train_alone(
    model: Model, optimizer: torch.optim.Optimizer, steps: int, clip: float | None = None
) -> None:
    """Train in this process on whole batches."""
    for step in range(steps):
        inputs, labels = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def train_together(
    model: Model,
    optimizer: hvd.DistributedOptimizer,
    steps: int,
    clip: float | None = None,
    set_to_none: bool = True,
) -> None:
    """Train on all ranks, each on its share."""
    for step in range(steps):
        inputs, labels = map(own, batch(step))
        optimizer.sample_weight = len(inputs)
        optimizer.zero_grad(set_to_none=set_to_none)
        F.cross_entropy(model(inputs), labels).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def together(
    make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
) -> tuple[Model, hvd.DistributedOptimizer]:
    """Return a model that starts equal on all ranks, and its wrapped optimizer."""
    model = build(seed=hvd.rank())
    hvd.broadcast_parameters(model.state_dict())
    optimizer = make(list(model.parameters()))
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters())


def momentum(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD with momentum and weight decay."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3)


def refused(kind: type[Exception], call: Callable[[], object]) -> str:
    """Return the message of the error that `call` must raise."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def warned(kind: type[Warning], call: Callable[[], object]) -> str:
    """Return the text of the one warning that `call` must give."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert [warning.category for warning in caught] == [kind], caught
    return str(caught[0].message)


@case
def equals_one_process() -> None:
    for make in (momentum, partial(torch.optim.Adam, lr=0.01)):
        for set_to_none in (True, False):
            for clip in (None, 0.05):
                model, optimizer = together(make)
                train_together(model, optimizer, 6, clip, set_to_none)
                alone = build()
                train_alone(alone, make(list(alone.parameters())), 6, clip)
                assert difference(model, alone) < 1e-13


@case
def gradients_are_reduced_when_backward_returns() -> None:
    model, optimizer = together(momentum)
    inputs, labels = batch(0)
    optimizer.sample_weight = len(own(inputs))
    F.cross_entropy(model(own(inputs)), own(labels)).backward()
    alone = build()
    F.cross_entropy(alone(inputs), labels).backward()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert p.grad.stride() == p.stride()
        assert float((p.grad - q.grad).abs().max()) < 1e-15
    optimizer.step()


@case
def sum_and_plain_average() -> None:
    for op, factor in ((hvd.Sum, hvd.size()), (hvd.Average, 1)):
        weight = torch.nn.Parameter(torch.zeros(3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=op)
        (weight * (hvd.rank() + 1.0)).sum().backward()
        optimizer.step()
        mean = (hvd.size() + 1) / 2
        assert torch.allclose(weight, torch.full((3,), -mean * factor))


@case
def frozen_and_unused_parameters() -> None:
    model = build()
    spare = torch.nn.Linear(3, 3).double()
    spare_on_rank_0 = torch.nn.Linear(1, 1).double()
    model[0].weight.requires_grad_(False)
    whole = torch.nn.ModuleList([model, spare, spare_on_rank_0])
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(whole.parameters(), lr=0.1), whole.named_parameters()
    )
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(own(batch(0)[0])).square().mean()
        if hvd.rank() == 0:
            loss = loss + spare_on_rank_0.weight.sum()
        loss.backward()
        optimizer.step()
        assert model[0].weight.grad is None
        assert spare.weight.grad is None
        assert spare_on_rank_0.bias.grad is None
        assert spare_on_rank_0.weight.grad is not None
        assert spare_on_rank_0.weight.grad.item() == 1.0 / hvd.size()
        assert model[3].weight.grad is not None


@case
def a_rank_without_samples_steps_along() -> None:
    model, optimizer = together(momentum)
    alone = build()
    reference = momentum(list(alone.parameters()))
    inputs, labels = batch(0)
    for _ in range(3):
        optimizer.zero_grad()
        optimizer.sample_weight = len(inputs) if hvd.rank() == hvd.size() - 1 else 0
        if hvd.rank() == hvd.size() - 1:
            F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        reference.zero_grad()
        F.cross_entropy(alone(inputs), labels).backward()
        reference.step()
    assert difference(model, alone) < 1e-14


@case
def a_step_that_is_skipped() -> None:
    model, optimizer = together(momentum)
    inputs, labels = map(own, batch(0))
    optimizer.sample_weight = len(inputs)
    before = [p.clone() for p in model.parameters()]
    F.cross_entropy(model(inputs), labels).backward()
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), labels).backward()
    model.zero_grad()
    F.cross_entropy(model(inputs), labels).backward()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    optimizer.step()
    alone = build()
    train_alone(alone, momentum(list(alone.parameters())), 1)
    assert difference(model, alone) < 1e-14


@case
def two_backwards_without_a_step() -> None:
    model, optimizer = together(momentum)
    loss = model(own(batch(0)[0])).sum()
    loss.backward(retain_graph=True)
    message = refused(RuntimeError, loss.backward)
    assert "more than backward_passes_per_step=1 times before step()" in message
    optimizer.zero_grad()


@case
def synchronize_then_step() -> None:
    model, optimizer = together(momentum)
    inputs, labels = map(own, batch(0))
    optimizer.sample_weight = len(inputs)
    F.cross_entropy(model(inputs), labels).backward()
    optimizer.synchronize()
    assert "within `with optimizer.skip_synchronize():`" in warned(UserWarning, optimizer.step)
    alone = build()
    train_alone(alone, momentum(list(alone.parameters())), 1)
    assert difference(model, alone) < 1e-14


@case
def closures() -> None:
    # LBFGS flattens gradients with view(), which a channels-last one does not allow.
    model, alone = (build(memory_format=torch.contiguous_format) for _ in range(2))
    make = partial(torch.optim.LBFGS, lr=0.5, max_iter=4)
    optimizer, reference = (
        hvd.DistributedOptimizer(make(model.parameters())),
        make(alone.parameters()),
    )
    inputs, labels = batch(0)
    optimizer.sample_weight = len(own(inputs))

    def closure(m: Model, o: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> object:
        o.zero_grad()
        loss = F.cross_entropy(m(x), y)
        loss.backward()
        return loss

    optimizer.step(partial(closure, model, optimizer, own(inputs), own(labels)))
    reference.step(partial(closure, alone, reference, inputs, labels))
    assert difference(model, alone) < 1e-10


@case
def schedulers_and_state() -> None:
    model, optimizer = together(momentum)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train_together(model, optimizer, 1)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    saved = optimizer.state_dict()
    again = momentum(list(model.parameters()))
    again.load_state_dict(saved)
    optimizer.load_state_dict(again.state_dict())
    assert len(optimizer.state) == len(list(model.parameters()))
    hvd.broadcast_optimizer_state(optimizer)


@case
def passes_for_the_class_that_it_wraps() -> None:
    _, optimizer = together(momentum)
    for kind in (hvd.DistributedOptimizer, torch.optim.SGD, torch.optim.Optimizer):
        assert isinstance(optimizer, kind)
    assert not isinstance(optimizer, torch.optim.Adam)
    assert optimizer.__class__.__name__ == "SGD"
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        assert "state_dict()" in refused(TypeError, partial(duplicate, optimizer))


@case
def parameters_added_later() -> None:
    first, second = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first], lr=1.0), [("first", first)])
    optimizer.add_param_group({"params": [second], "lr": 2.0})
    ((first + second) * float(hvd.rank())).sum().backward()
    optimizer.step()
    mean = (hvd.size() - 1) / 2
    assert first.tolist() == [-mean] * 2
    assert second.tolist() == [-2 * mean] * 2


@case
def unfrozen_later() -> None:
    model = build()
    model[0].weight.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(momentum(list(model.parameters())))
    model[0].weight.requires_grad_(True)
    model(own(batch(0)[0])).sum().backward()
    assert "wrap the optimizer again" in refused(RuntimeError, optimizer.step)


@case
def two_optimizers_in_turn() -> None:
    one, first = together(momentum)
    two, second = together(partial(torch.optim.Adam, lr=0.01))
    for step in range(3):
        inputs, labels = map(own, batch(step))
        first.sample_weight = second.sample_weight = len(inputs)
        first.zero_grad()
        second.zero_grad()
        (F.cross_entropy(one(inputs), labels) + F.cross_entropy(two(inputs), labels)).backward()
        first.step()
        second.step()
    for model, make in ((one, momentum), (two, partial(torch.optim.Adam, lr=0.01))):
        alone = build()
        train_alone(alone, make(list(alone.parameters())), 3)
        assert difference(model, alone) < 1e-13


@case
def operations_between_backward_and_step_where_ranks_use_different_parameters() -> None:
    if not hvd.mpi_threads_supported():
        return  # backward() then waits in MPI itself, which nothing calls back
    parts = [torch.nn.Linear(2, 2, bias=False).double() for _ in range(2)]
    with torch.no_grad():
        for part in parts:
            part.weight.fill_(1.0)
    parameters = [part.weight for part in parts]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0))
    size = hvd.size()
    for step in range(3):
        optimizer.zero_grad()
        # The last rank uses but one parameter, or none in the second step.
        used = parameters if hvd.rank() < size - 1 else parameters[: int(step != 1)]
        for weight in used:
            (weight.sum() * (hvd.rank() + 1)).backward()
        # Before others are through their backward passes, they have to hear that it is here.
        steps = hvd.allreduce(torch.tensor([float(step)]), op=hvd.Sum)
        assert float(steps) == step * size
        optimizer.step()
    total, last = size * (size + 1) / 2, size
    first = 1 - (3 * total - last) / size
    second = 1 - 3 * (total - last) / size
    assert torch.allclose(parameters[0], torch.full((2, 2), first).double())
    assert torch.allclose(parameters[1], torch.full((2, 2), second).double())


@case
def two_optimizers_in_another_order_on_each_rank() -> None:
    if not hvd.mpi_threads_supported():
        return  # backward() then waits in MPI itself, which nothing calls back
    pairs = [together(momentum), together(momentum)]
    alone = build()
    train_alone(alone, momentum(list(alone.parameters())), 2)
    for step in range(2):
        inputs, labels = map(own, batch(step))
        mine = pairs if hvd.rank() % 2 else pairs[::-1]
        for model, optimizer in mine:
            optimizer.sample_weight = len(inputs)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
        for _, optimizer in reversed(mine):
            optimizer.step()
    for model, _ in pairs:
        assert difference(model, alone) < 1e-13


@case
def bad_arguments() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    sgd = torch.optim.SGD([weight], lr=1.0)
    wrap = hvd.DistributedOptimizer
    assert "without a name" in refused(ValueError, partial(wrap, sgd, []))
    twice = [("a", weight), ("a", torch.nn.Parameter(torch.zeros(1)))]
    assert "names used twice: a" in refused(ValueError, partial(wrap, sgd, twice))
    assert "already" in refused(ValueError, partial(wrap, wrap(sgd)))
    wrong: Any = 3
    assert "got int" in refused(TypeError, partial(wrap, wrong))
    assert "op must be" in refused(ValueError, partial(wrap, sgd, op=hvd.Max))
    for wrong in (0, -1, "ab", ([weight],), [["weight"]], [[weight], [weight]]):
        assert "groups" in refused(ValueError, partial(wrap, sgd, groups=wrong))
    assert "use groups" in warned(DeprecationWarning, partial(wrap, sgd, num_groups=1))
    adasum = wrap(sgd, op=hvd.Adasum)
    refused(AssertionError, adasum.skip_synchronize().__enter__)
    optimizer = wrap(sgd)
    for weight_of_rank in (-1.0, float("nan"), float("inf")):
        message = refused(ValueError, partial(setattr, optimizer, "sample_weight", weight_of_rank))
        assert "sample_weight must be a finite number >= 0" in message


@case
def no_samples_is_no_end() -> None:
    model, optimizer = together(momentum)
    optimizer.sample_weight = 0
    assert "no rank has samples" in refused(ValueError, optimizer.step)
    train_together(model, optimizer, 2)
    alone = build()
    train_alone(alone, momentum(list(alone.parameters())), 2)
    assert difference(model, alone) < 1e-14


class Backwards(torch.nn.Module):
    """Uses its layers in another order than it defines them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.last = torch.nn.Linear(6, 2, dtype=torch.float64)
        self.first = torch.nn.Linear(4, 5, dtype=torch.float64)
        self.middle = torch.nn.Linear(5, 6, dtype=torch.float64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(inputs)).tanh())


@case
def plans_follow_the_order_in_which_gradients_come() -> None:
    for set_to_none in (True, False):
        model, alone = Backwards(), Backwards()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam(model.parameters()), model.named_parameters()
        )
        single = torch.optim.Adam(alone.parameters())
        for step in range(4):
            inputs = torch.randn(12, 4, generator=torch.Generator().manual_seed(step)).double()
            for trained, its_optimizer, part in (
                (model, optimizer, inputs[hvd.rank() * 12 // hvd.size() :][: 12 // hvd.size()]),
                (alone, single, inputs),
            ):
                its_optimizer.zero_grad(set_to_none=set_to_none)
                trained(part).square().mean().backward()
                its_optimizer.step()
            assert difference(model, alone) < 1e-12, step
        plan = plan_of(optimizer)
        names = [plan.specs[i].name for b in plan.buckets for i in b.parameters]
        layers = [name.split(".")[0] for name in names]
        assert layers == [*["last"] * 2, *["middle"] * 2, *["first"] * 2], names


@case
def buckets_are_as_set_or_as_measured() -> None:
    heard: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hvdtrain")
    level = logger.level
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    try:
        _, optimizer = together(momentum)
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)
    plan = plan_of(optimizer)
    assert {other.digest for other in hvd.allgather_object(plan)} == {plan.digest}
    buckets = context.current().buckets
    assert heard == ([f"buckets: {buckets}"] if hvd.rank() == 0 else [])
    assert buckets.startswith(f"{len(plan.buckets)} for 8.758 KiB of gradients, at most")
    if given := os.environ.get("HVDTRAIN_BUCKET_BYTES"):
        assert plan.bucket_bytes == int(given)
        assert buckets.endswith(f"{given} bytes each (as set)")
    elif hvd.size() > 1:
        assert plan.bucket_bytes in (25 << 20, *(1 << power for power in range(20, 27)))
        assert "(measured: an all-reduce starts in" in buckets or "too noisy" in buckets
    else:
        assert buckets.endswith("25 MiB each (the default for one rank)")


@case
def several_backward_passes_add_up() -> None:
    model = build()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(
        sgd, model.named_parameters(), backward_passes_per_step=2, gradient_predivide_factor=4.0
    )
    alone = build()
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in (0, 2):
        optimizer.zero_grad()
        reference.zero_grad()
        for inputs, labels in (batch(step), batch(step + 1)):
            optimizer.sample_weight = len(own(inputs))
            F.cross_entropy(model(own(inputs)), own(labels)).backward()
            F.cross_entropy(alone(inputs), labels).backward()
        optimizer.step()
        reference.step()
    assert difference(model, alone) < 1e-14


@case
def groups_of_gradients() -> None:
    # The last: where ranks give different groups, those of rank 0 count.
    for number in (1, 3, 100, 0, 1 + 2 * hvd.rank()):
        model = build()
        parameters = list(model.parameters())
        groups = number or [parameters[:2], parameters[3:5]]
        optimizer = hvd.DistributedOptimizer(
            momentum(parameters), model.named_parameters(), groups=groups
        )
        train_together(model, optimizer, 2)
        alone = build()
        train_alone(alone, momentum(list(alone.parameters())), 2)
        assert difference(model, alone) < 1e-14


@case
def half_precision_weights() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        used, unused, mine = (torch.nn.Parameter(torch.zeros(3, dtype=dtype)) for _ in range(3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([used, unused, mine], lr=1.0))
        for step in range(2):
            optimizer.zero_grad()
            loss = used.sum() * (hvd.rank() + 1)
            if hvd.rank() == 0:
                loss = loss + mine.sum() * hvd.size()
            loss.backward()
            # One rank alone has no peer to share memory with, and copies to float32 and back.
            assert hvd.size() == 1 or lie_in_engine_memory(optimizer, [used])
            optimizer.step()
            mean = (hvd.size() + 1) / 2
            assert used.tolist() == [-mean * (step + 1)] * 3
            assert mine.tolist() == [-1.0 * (step + 1)] * 3
            assert unused.grad is None


def lie_in_engine_memory(
    optimizer: hvd.DistributedOptimizer, parameters: Iterable[torch.nn.Parameter]
) -> bool:
    """Tell whether all gradients lie where the engine reduces them: shared, if there are peers."""
    assert optimizer._gradients is not None
    memory = optimizer._gradients.reducer._memory
    begin = memory.ctypes.data
    lines = Path("/proc/self/maps").read_text().splitlines()
    (line,) = [text for text in lines if _covers(text.split()[0], begin)]
    assert hvd.size() == 1 or "/memfd:hvdtrain-memory" in line
    gradients = [p.grad for p in parameters]
    assert gradients
    return all(
        g is not None and begin <= g.data_ptr() <= begin + memory.size - g.nbytes for g in gradients
    )


def _covers(extent: str, address: int) -> bool:
    start, end = (int(number, 16) for number in extent.split("-"))
    return start <= address < end


@case
def gradients_lie_in_engine_memory() -> None:
    forwards: list[Callable[[Model, torch.Tensor], torch.Tensor]] = [Model.__call__]
    forwards += [partial(checkpointed, reentrant=reentrant) for reentrant in (True, False)]
    if hvd.size() == 2:  # takes seconds, and does not depend on the number of ranks
        forwards += [partial(compiled, backend=backend) for backend in ("eager", "aot_eager")]
    for number, forward in enumerate(forwards):
        model, optimizer = together(momentum)
        unused = torch.nn.Parameter(torch.zeros(2))
        optimizer.add_param_group({"params": [unused]})
        for step in range(3):
            optimizer.zero_grad(set_to_none=(number + step) % 2 == 0)
            inputs, labels = map(own, batch(step))
            optimizer.sample_weight = len(inputs)
            F.cross_entropy(forward(model, inputs), labels).backward()
            assert lie_in_engine_memory(optimizer, model.parameters()), (number, step)
            optimizer.step()
            assert unused.grad is None
        alone = build()
        train_alone(alone, momentum(list(alone.parameters())), 3)
        assert difference(model, alone) < 1e-13, number


def checkpointed(model: Model, inputs: torch.Tensor, reentrant: bool) -> torch.Tensor:
    """Compute without keeping what lies between the layers."""
    inputs.requires_grad_()  # without it the older form has nothing to differentiate
    result: torch.Tensor = checkpoint(model, inputs, use_reentrant=reentrant)
    return result


def compiled(model: Model, inputs: torch.Tensor, backend: str) -> torch.Tensor:
    """Compute with a compiled model."""
    result: torch.Tensor = torch.compile(model, backend=backend)(inputs)
    return result


@case
def gradients_come_back_to_engine_memory() -> None:
    """A gradient that a script has put in the place of ours is taken, and then is ours again."""
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), backward_passes_per_step=2
    )
    mean = (hvd.size() + 1) / 2
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        (weight * (hvd.rank() + 1)).sum().backward()
        assert weight.grad is not None
        weight.grad = weight.grad + 1  # between two passes that add up
        (weight * (hvd.rank() + 1)).sum().backward()
        assert lie_in_engine_memory(optimizer, [weight])
        assert weight.grad.tolist() == [2 * mean + 1] * 3
        weight.grad = weight.grad / 2  # what clipping may do
        optimizer.step()
        assert weight.tolist() == [-(mean + 0.5) * (step + 1)] * 3


@case
def gradients_that_are_differentiated_again() -> None:
    """For w^3 (r + 1) the gradient is 3 w^2 (r + 1), averaged, and its derivative 6 w (r + 1)."""
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.01))
    for number in range(3):
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        before = weight.detach().clone()
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # of the cycle
            (weight**3 * (hvd.rank() + 1)).sum().backward(create_graph=True)
        assert weight.grad is not None
        assert torch.allclose(weight.grad, 3 * before**2 * (hvd.size() + 1) / 2)
        (second,) = torch.autograd.grad(weight.grad.sum(), weight)
        assert torch.allclose(second, 6 * before * (hvd.rank() + 1))
        optimizer.step()
    optimizer.zero_grad()
    weight.sum().backward()
    assert lie_in_engine_memory(optimizer, [weight])
    optimizer.zero_grad()


@case
def sparse_gradients() -> None:
    for sparse_as_dense in (False, True):
        table = torch.nn.Embedding(6, 2, sparse=True).double()
        with torch.no_grad():
            table.weight.zero_()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=1.0),
            table.named_parameters(),
            sparse_as_dense=sparse_as_dense,
        )
        for _ in range(2):
            optimizer.zero_grad()
            if hvd.rank() != 1:  # this rank has none
                table(torch.tensor([hvd.rank(), 5])).sum().backward()
            optimizer.step()
        users = [rank for rank in range(hvd.size()) if rank != 1]
        expected = torch.zeros(6, 2).double()
        expected[users] = -2.0 / hvd.size()
        expected[5] = -2.0 * len(users) / hvd.size()
        assert torch.allclose(table.weight, expected)


@case
def sparse_gradients_for_an_optimizer_that_takes_no_others() -> None:
    def table() -> torch.nn.Embedding:
        torch.manual_seed(0)
        return torch.nn.Embedding(6, 2, sparse=True, dtype=torch.float64)

    def adam(of: torch.nn.Embedding) -> torch.optim.Optimizer:
        return torch.optim.SparseAdam(list(of.parameters()), lr=0.1)

    for sparse_as_dense in (False, True):
        ours, alone = table(), table()
        reference = adam(alone)
        optimizer = hvd.DistributedOptimizer(
            adam(ours), ours.named_parameters(), op=hvd.Sum, sparse_as_dense=sparse_as_dense
        )
        for step in range(3):  # row 4 is never used; row `step` is, by all ranks
            optimizer.zero_grad()
            reference.zero_grad()
            (ours(torch.tensor([hvd.rank(), step])) * (hvd.rank() + 1)).sum().backward()
            for rank in range(hvd.size()):
                (alone(torch.tensor([rank, step])) * (rank + 1)).sum().backward()
            optimizer.step()
            reference.step()
        assert difference(ours, alone) < 1e-14
        assert torch.equal(ours.weight[4], table().weight[4])


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
        inputs = torch.randn(11, 4, generator=torch.Generator().manual_seed(step)).double()
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


if __name__ == "__main__":
    hvd.init()
    for function in CASES:
        function()
    has_thread = any(thread.name == "hvdtrain-channel" for thread in threading.enumerate())
    report(cases=len(CASES), payload={"reduces in a thread": has_thread})
