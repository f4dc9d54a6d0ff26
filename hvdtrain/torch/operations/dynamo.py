"""What keeps torch.compile away from hvdtrain's functions (all local)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


# Of this thread; None unless functions that it calls may be compiled.
_callback = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", bool)


def is_compiling() -> bool:
    """Return whether the caller is being compiled, or what it calls would be."""
    return torch.compiler.is_dynamo_compiling() or _callback() is not None


def disable_compile(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that torch.compile does not compile, nor what the function calls.

    This is torch.compiler.disable without its import of the compiler, which takes more than a
    second and is left to the program.
    """
    disabled, modules = torch._disable_dynamo(function), sys.modules

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if "torch._dynamo" in modules and is_compiling():
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    # The compiler limits the number of versions of one code object.
    call.__code__ = call.__code__.replace(co_name=function.__name__)
    return wraps(function)(call)


def in_compiled_backward() -> bool:
    """Return whether a backward pass compiled by torch.compile is running.

    Such a pass calls hooks on gradients, but not callbacks queued for its end.
    """
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "in_compiled_autograd_region", False))
