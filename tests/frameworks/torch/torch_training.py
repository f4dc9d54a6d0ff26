"""A small model for optimizers, trained by all ranks together and by one process alone."""

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

import hvdtrain.torch as hvd
from hvdtrain.core.gradients.plan import BucketPlan
from hvdtrain.core.process_set import ProcessSet, global_process_set

Model = torch.nn.Sequential
Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def ranks_sum() -> int:
    return hvd.size() * (hvd.size() + 1) // 2


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
    with torch.device("cpu"):  # that of the generator
        generator = torch.Generator().manual_seed(100 + step)
        inputs = torch.randn(11, 2, 4, 4, generator=generator, dtype=torch.float64)
        labels = torch.randint(0, 4, (11,), generator=generator)
    device = torch.get_default_device()
    return inputs.to(device), labels.to(device)


def drawn(seed: int, *shape: int) -> torch.Tensor:
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return numbers.double().to(torch.get_default_device())


def own(tensor: torch.Tensor, rank: int | None = None) -> torch.Tensor:
    return tensor[hvd.rank() if rank is None else rank :: hvd.size()]


def difference(a: torch.nn.Module, b: torch.nn.Module) -> float:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max(float((p - q).detach().abs().max()) for p, q in pairs)


def check_equal(tensors: Iterable[torch.Tensor], members: ProcessSet = global_process_set) -> None:
    """Check that tensors have the same bits on all ranks."""
    whole = torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).reshape(1, -1)
    gathered = hvd.allgather(whole, name="tensors", process_set=members)
    assert all(torch.equal(gathered[0], other) for other in gathered)


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def grad_of(weight: torch.Tensor) -> torch.Tensor:
    assert weight.grad is not None
    return weight.grad


def gradients_of(optimizer: hvd.DistributedOptimizer) -> Any:
    """Return what a wrapped optimizer has instead of gradients of its own."""
    assert optimizer._exchanged.gradients is not None
    return optimizer._exchanged.gradients


def plan_of(optimizer: hvd.DistributedOptimizer) -> BucketPlan:
    plan: BucketPlan = gradients_of(optimizer).plan
    return plan


def train_alone(
    model: Model, optimizer: torch.optim.Optimizer, steps: int, clip: float | None = None
) -> None:
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
    for step in range(steps):
        inputs, labels = map(own, batch(step))
        optimizer.sample_weight = len(inputs)
        optimizer.zero_grad(set_to_none=set_to_none)
        F.cross_entropy(model(inputs), labels).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def together(make: Make, **options: Any) -> tuple[Model, hvd.DistributedOptimizer]:
    """Return a model that starts equal on all ranks, and its wrapped optimizer."""
    model = build(seed=hvd.rank())
    hvd.broadcast_parameters(model.state_dict())
    optimizer = make(list(model.parameters()))
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)


def wrapped_sgd(*weights: torch.Tensor, **options: Any) -> hvd.DistributedOptimizer:
    """Return a wrapped SGD that takes gradients away as they are."""
    return hvd.DistributedOptimizer(torch.optim.SGD(list(weights), lr=1.0), **options)


def zeros(count: int, *shape: int, dtype: torch.dtype = torch.float64) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(*shape, dtype=dtype)) for _ in range(count)]


def check_equals_alone(
    model: Model, make: Make, steps: int, bound: float = 1e-13, clip: float | None = None
) -> None:
    alone = build()
    train_alone(alone, make(list(alone.parameters())), steps, clip)
    assert difference(model, alone) < bound


def momentum(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3)


def mean_of_ranks() -> float:
    return (hvd.size() + 1) / 2


def refused(kind: type[Exception], call: Callable[[], object]) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def warned(kind: type[Warning], call: Callable[[], object]) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert [warning.category for warning in caught] == [kind], caught
    return str(caught[0].message)


def lie_in_engine_memory(
    optimizer: hvd.DistributedOptimizer, parameters: Iterable[torch.nn.Parameter]
) -> bool:
    """Return whether all gradients lie where the engine reduces them.

    On the host that is shared memory, if there are peers.
    """
    buckets = gradients_of(optimizer).buckets
    ((device, memory),) = buckets.memory.items()
    begin, nbytes = _extent(memory)
    if device == "cpu":
        lines = Path("/proc/self/maps").read_text().splitlines()
        (line,) = [text for text in lines if _covers(text.split()[0], begin)]
        assert hvd.size() == 1 or "/memfd:hvdtrain-memory" in line
    gradients = [p.grad for p in parameters]
    assert gradients
    arena = None if buckets.staying is None else buckets.staying.arena
    return all(
        g is not None
        and (
            begin <= g.data_ptr() <= begin + nbytes - g.nbytes
            or (arena is not None and arena.offset(g.data_ptr()) is not None)
        )
        for g in gradients
    )


def _extent(memory: object) -> tuple[int, int]:
    if isinstance(memory, torch.Tensor):
        return memory.data_ptr(), memory.numel()
    assert isinstance(memory, np.ndarray)
    return memory.ctypes.data, memory.size


def _covers(extent: str, address: int) -> bool:
    start, end = (int(number, 16) for number in extent.split("-"))
    return start <= address < end
