"""What a step does on a GPU besides the arithmetic, as torch's profiler saw it."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from gpu_ranks import FIGURES, device
from torch.nn import functional as F

import hvdtrain.torch as hvd
from hvdtrain.core import context

# The host waits for the device in these; a query does not wait.
WAITS = re.compile(r"cu(da)?(Stream|Device|Ctx|Context|Event)Synchronize")
COPIES = re.compile(r"Memcpy (DtoH|HtoD)")
REDUCTION = re.compile(r"nccl", re.IGNORECASE)
PRODUCT = re.compile(r"gemm|cutlass|cublas|nvjet", re.IGNORECASE)


@dataclass(frozen=True)
class Seen:
    """An event: its name, whether it ran on the device, and when, in microseconds."""

    name: str
    on_device: bool
    start: float
    end: float


def events_of(work: Callable[[], None]) -> list[Seen]:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        with torch.profiler.record_function("begin of the work"):
            pass
        work()
        with torch.profiler.record_function("end of the work"):
            pass
        torch.cuda.synchronize()
    found = [
        Seen(
            event.name,
            event.device_type == torch.autograd.DeviceType.CUDA,
            event.time_range.start,
            event.time_range.end,
        )
        for event in profile.events() or []
    ]
    begin = next(e.end for e in found if e.name == "begin of the work" and not e.on_device)
    end = next(e.start for e in found if e.name == "end of the work" and not e.on_device)
    return [e for e in found if e.start >= begin and (e.on_device or e.start <= end)]


def steps_of(
    model: torch.nn.Module, optimizer: hvd.DistributedOptimizer, weight: float | None
) -> Callable[[], None]:
    """Return what trains a step on inputs that lie on the device already."""
    width = next(model.parameters()).shape[1]
    inputs, labels = torch.randn(width, width), torch.randint(0, width, (width,))
    optimizer.sample_weight = weight

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    return step


def deep_model(width: int) -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(6)))


def is_nccl() -> bool:
    return device().type == "cuda" and context.current().engine_name == "nccl"


def nothing_is_copied_to_the_host_and_the_host_never_waits() -> None:
    if not is_nccl():
        return
    for weight in (None, 8.0):
        model = deep_model(512)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        step = steps_of(model, optimizer, weight)
        for _ in range(4):
            step()
        events = events_of(step)
        kernels = [e for e in events if e.on_device]
        assert any("gemm" in e.name.lower() or "cutlass" in e.name.lower() for e in kernels), (
            kernels
        )
        if hvd.size() > 1:
            assert any(REDUCTION.search(e.name) for e in kernels), {e.name for e in kernels}
        copies = [e.name for e in events if COPIES.search(e.name)]
        waits = [e.name for e in events if WAITS.search(e.name)]
        assert (copies, waits) == ([], []), (weight, copies, waits)


def the_profiler_sees_copies_and_waits() -> None:
    """As the case before would: this is what it must not find."""
    if device().type != "cuda":
        return
    ones = torch.ones(1000)
    names = [e.name for e in events_of(lambda: print(float(ones.sum().cpu())))]
    assert any(COPIES.search(name) for name in names), names
    assert any(WAITS.search(name) for name in names), names


def reductions_begin_before_backward_ends() -> None:
    if not is_nccl() or hvd.size() == 1:
        return
    model = deep_model(4096)  # backward takes tens of milliseconds
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), groups=6)
    step = steps_of(model, optimizer, None)
    for _ in range(4):
        step()
    kernels = [e for e in events_of(step) if e.on_device and "Mem" not in e.name]
    reductions = [e for e in kernels if REDUCTION.search(e.name)]
    products = [e for e in kernels if PRODUCT.search(e.name)]
    assert reductions
    assert products
    busy = sum(e.end - e.start for e in reductions)
    last = max(e.end for e in products)
    hidden = sum(max(0.0, min(e.end, last) - e.start) for e in reductions)
    # When things run on a shared GPU is not for a test to say.
    FIGURES["reductions in a step"] = len(reductions)
    FIGURES["share of their time before backward's last product ended"] = round(hidden / busy, 3)
