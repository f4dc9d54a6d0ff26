"""What the tests' device promises: an accelerator's behaviour, and closed memory."""

from __future__ import annotations

import copy
import ctypes
import gc
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hidden_device import HiddenMemoryError, allowed, install, refusals
from hidden_memory import DEVICE, elements_behind
from torch.autograd.graph import get_gradient_edge

import hvdtrain

CASES: list[Callable[[], None]] = []


def case(function: Callable[[], None]) -> Callable[[], None]:
    """Add a function to the table."""
    CASES.append(function)
    return function


def seen(tensor: torch.Tensor) -> object:
    """Return the elements as a list."""
    with allowed():
        return tensor.tolist()


@case
def the_host_reads_nothing() -> None:
    tensor = torch.arange(6.0, device=DEVICE)
    reads: list[Callable[[], object]] = [
        *(tensor.cpu, tensor.tolist, tensor.sum().item),
        *(lambda: tensor.to("cpu", torch.float64), lambda: torch.empty(6).copy_(tensor)),
        *(lambda: bool(tensor.sum() == 15), lambda: torch.equal(tensor, tensor)),
        lambda: torch.allclose(tensor, tensor),
    ]
    before = len(refusals())
    for read in reads:
        raises(HiddenMemoryError, read)
    assert len(refusals()) == before + len(reads), refusals()
    assert repr(tensor) == "tensor([0., 1., 2., 3., 4., 5.], device='hidden:0')"
    raises(TypeError, tensor.numpy)
    raises(TypeError, lambda: np.asarray(tensor))
    raises(RuntimeError, lambda: np.from_dlpack(tensor))
    raises(AttributeError, lambda: tensor.__cuda_array_interface__)


def raises(kind: type[Exception], call: Callable[[], object]) -> None:
    """Fail unless `call` raises such an error."""
    try:
        call()
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


@case
def hvdtrain_may_never_read() -> None:
    product = str(Path(hvdtrain.__file__).parent / "module.py")
    read: dict[str, Any] = {}
    exec(compile("def read(tensor): return tensor.tolist()", product, "exec"), read)
    tensor = torch.ones(2, device=DEVICE, requires_grad=True)
    before = len(refusals())
    # In a thread of autograd's.
    tensor.register_hook(lambda gradient: raises(HiddenMemoryError, lambda: read["read"](gradient)))
    with allowed():
        tensor.sum().backward()
        raises(HiddenMemoryError, lambda: read["read"](tensor))
        tensor.tolist()
    assert len(refusals()) == before + 2


@case
def views_share_memory() -> None:
    whole = torch.zeros(10, device=DEVICE)
    assert whole[3:].data_ptr() - whole.data_ptr() == 12
    assert whole.untyped_storage().data_ptr() == whole.data_ptr() != 0
    torch.as_strided(whole, (2, 2), (1, 2), 1).fill_(1)
    whole.narrow(0, 6, 2).copy_(torch.tensor([5.0, 6.0]))
    whole.view(torch.uint8)[36:].fill_(0)
    whole.split(5)[0].mul_(2)
    torch.cat([whole[:1], whole[1:]])[:] = 7
    assert seen(whole) == [0, 2, 2, 2, 2, 0, 5, 6, 0, 0]
    twin = copy.deepcopy(whole)
    twin.zero_()
    assert whole.detach().data_ptr() == whole.data_ptr() != twin.data_ptr()
    assert seen(whole[1]) == 2
    elements_behind(whole[1:]).fill_(3)
    assert seen(whole[:3]) == [0, 3, 3]


@case
def arithmetic_of_many_kinds() -> None:
    whole = torch.arange(4, device=DEVICE)
    assert seen((whole.double() * 0.5).trunc_().to(torch.int32)) == [0, 0, 1, 1]
    assert seen(whole.bitwise_xor(-(1 << 63)).bitwise_xor_(-(1 << 63))) == [0, 1, 2, 3]
    assert seen(torch.add(whole, whole, out=torch.empty(0, dtype=torch.int64, device=DEVICE))) == [
        *(0, 2, 4, 6)
    ]
    assert seen(whole.to(torch.bfloat16) + torch.tensor(0.5)) == [0.5, 1.5, 2.5, 3.5]
    raises(RuntimeError, lambda: whole + torch.arange(4))
    lazy = torch.tensor([1 + 2j], device=DEVICE).conj()
    assert lazy.is_conj()
    assert seen(lazy.clone()) == [1 - 2j]
    assert seen(torch.empty(3, device=DEVICE).isnan()) == [True] * 3


@case
def memory_is_given_back() -> None:
    tensor = torch.ones(1000, device=DEVICE)
    behind = weakref.ref(elements_behind(tensor).untyped_storage())
    view = tensor[5:]
    del tensor
    gc.collect()
    assert seen(view[0]) == 1
    del view
    gc.collect()
    assert behind() is None


def trained(device: str) -> tuple[object, list[tuple[str, int]]]:
    """Train a model whose gradients lie in memory that it was given; return it, and its hooks."""
    torch.manual_seed(1)
    layers = [torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(4, 2)).to(device)
    parameters = list(model.parameters())
    calls: list[tuple[str, int]] = []
    nodes = [get_gradient_edge(parameter).node for parameter in parameters]
    memory = torch.zeros(sum(parameter.numel() for parameter in parameters), device=device)
    start = 0
    for i, parameter in enumerate(parameters):
        place = torch.as_strided(memory, parameter.shape, parameter.stride(), start)
        parameter.grad = place.detach()
        start += parameter.numel()
        parameter.register_post_accumulate_grad_hook(lambda _, i=i: calls.append(("tensor", i)))
        nodes[i].register_hook(lambda *_, i=i: calls.append(("node", i)))
    optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9, foreach=False)
    samples, labels = torch.randn(5, 3).to(device), torch.randn(5, 2).to(device)
    for _ in range(3):
        memory.zero_()
        torch.nn.functional.mse_loss(model(samples), labels).backward()
        optimizer.step()
    assert [p.grad.data_ptr() for p in parameters if p.grad is not None] == sorted(
        p.grad.data_ptr() for p in parameters if p.grad is not None
    )
    with allowed():
        return [parameter.tolist() for parameter in (*parameters, memory)], calls


@case
def models_train_as_on_the_cpu() -> None:
    here, there = trained("cpu"), trained(DEVICE)
    assert here == there
    assert len(there[1]) == 3 * 2 * 6, there[1]


def read_at_the_address() -> None:
    """Read where a tensor lies: the process ends here."""
    tensor = torch.ones(3, device=DEVICE)
    print(ctypes.c_float.from_address(tensor.data_ptr()).value)


if __name__ == "__main__":
    install()
    install()
    if sys.argv[1:] == ["address"]:
        read_at_the_address()
    for function in CASES:
        function()
    print(len(CASES))
