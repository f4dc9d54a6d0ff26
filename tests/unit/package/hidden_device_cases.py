"""What the tests' device promises: an accelerator's behaviour, and closed memory."""

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hidden_device import HiddenMemoryError, allowed, install, refusals
from hidden_memory import DEVICE

import hvdtrain

CASES: list[Callable[[], None]] = []


def case(function: Callable[[], None]) -> Callable[[], None]:
    """Add a function to the table."""
    CASES.append(function)
    return function


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
    print(len(CASES), flush=True)
    # Autograd's thread frees memory of the device in Python after backward() has returned, and ends
    # a process whose interpreter has gone by then.
    os._exit(0)
