"""What goes on while torch.compile compiles. Local."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

__all__ = ["in_compiled_backward", "uncompiled"]

P = ParamSpec("P")
T = TypeVar("T")


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function such that torch.compile runs it, and what it calls, uncompiled.

    As torch.compiler.disable, which however imports the compiler: that takes more than a second,
    and is left to the program.
    """
    disabled = torch._disable_dynamo(function)

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if "torch._dynamo" in sys.modules:
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    # The compiler keeps but so many versions of one piece of code.
    call.__code__ = call.__code__.replace(co_name=function.__name__)
    return wraps(function)(call)


def in_compiled_backward() -> bool:
    """Return whether a backward pass is running that torch.compile has compiled.

    It calls hooks on gradients, but not what was queued for its end.
    """
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "in_compiled_autograd_region", False))
