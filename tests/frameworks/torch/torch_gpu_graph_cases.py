"""Models and steps that torch.compile compiles, and steps in a CUDA graph, which are refused."""

import warnings
from collections.abc import Callable
from functools import partial

import torch
from gpu_ranks import device
from torch.nn import functional as F
from torch_gpu_optimizer_cases import assert_equals_one_rank
from torch_training import batch, momentum, own, together

import hvdtrain.torch as hvd


def train_compiled(backend: str) -> None:
    model, optimizer = together(momentum)
    forward = torch.compile(model, backend=backend, dynamic=True)
    for step in range(3):
        inputs, labels = map(own, batch(step))
        optimizer.sample_weight = len(inputs)
        optimizer.zero_grad()
        with warnings.catch_warnings(action="ignore"):  # of the compiler's own
            F.cross_entropy(forward(inputs), labels).backward()
        optimizer.step()
    assert_equals_one_rank(model, momentum, 3)


def compiled_models() -> None:
    train_compiled("aot_eager")
    if device().type == "cuda":  # on a CPU a compiler of C++ takes too long
        train_compiled("inductor")


def captured(work: Callable[[], object]) -> str:
    graph, text = torch.cuda.CUDAGraph(), ""
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            work()
        except Exception as error:
            text = str(error)
        finally:
            try:
                graph.capture_end()
            except RuntimeError as error:
                text = text or f"the capture broke: {error}"
    torch.cuda.synchronize()
    return text


def operations_in_a_cuda_graph_are_refused() -> None:
    if device().type != "cuda":
        return
    ones = torch.ones(3)
    calls: dict[str, Callable[[], object]] = {
        "allreduce": partial(hvd.allreduce, ones, name="captured"),
        "allreduce_": partial(hvd.allreduce_, ones, name="captured"),
        "allgather": partial(hvd.allgather, ones, name="captured"),
        "broadcast": partial(hvd.broadcast, ones, 0, name="captured"),
    }
    for name, call in calls.items():
        text = captured(call)
        assert "CUDA graph" in text, (name, text)
        assert f"[rank {hvd.rank()}/{hvd.size()}]" in text, (name, text)
    assert hvd.allreduce(ones, name="captured", op=hvd.Sum).tolist() == [float(hvd.size())] * 3


def steps_in_a_cuda_graph_are_refused() -> None:
    if device().type != "cuda":
        return
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))

    def step() -> None:
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()

    step()
    text = captured(step)
    assert "CUDA graph" in text, text
    optimizer.zero_grad()
    step()
    assert weight.tolist() == [-2.0] * 3
