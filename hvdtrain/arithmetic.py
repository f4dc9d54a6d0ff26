"""The floating-point mode in which all ranks add, whichever of their threads does.

Frameworks have their threads take numbers that are too small to be normal for zeros
(torch.set_flush_denormal, TensorFlow's pools), and a thread inherits that from the one that starts
it. Ranks whose threads differ would get different sums of equal numbers.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

__all__ = ["in_default_arithmetic"]

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

# From fenv.h: fenv_t has 8 bytes on aarch64 and 32 on x86_64. Other machines name the default
# environment in other ways.
_KNOWN = platform.machine() in ("aarch64", "x86_64")
_Environment = ctypes.c_uint64 * 4
_DEFAULT = ctypes.c_void_p(-1)
# Without giving Python's lock away, which would be dear beside a busy thread.
_LIBM = ctypes.PyDLL(None)


def in_default_arithmetic(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Have a function, and the threads that it starts, compute as threads do by default (local).

    Numbers below the smallest normal one count, and rounding is to nearest. The caller's own mode
    is as before when the function returns.
    """
    if not _KNOWN:
        return function

    @wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        kept = _Environment()
        _LIBM.fegetenv(kept)
        _LIBM.fesetenv(_DEFAULT)
        try:
            return function(*args, **kwargs)
        finally:
            _LIBM.fesetenv(kept)

    return run
