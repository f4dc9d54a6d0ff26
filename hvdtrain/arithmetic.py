"""The floating-point mode in which all ranks compute sums.

Frameworks make their threads flush subnormal numbers to zero (torch.set_flush_denormal,
TensorFlow's thread pools), and a thread inherits this mode from the one that starts it. Ranks whose
threads differ would get different sums of equal numbers.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

# From fenv.h: fenv_t has 8 bytes on aarch64 and 32 on x86_64. FE_DFL_ENV differs on other machines.
_KNOWN = platform.machine() in ("aarch64", "x86_64")
_Environment = ctypes.c_uint64 * 4
_DEFAULT = ctypes.c_void_p(-1)
# PyDLL keeps the GIL; releasing it would be expensive while another thread is busy.
_LIBM = ctypes.PyDLL(None)


def in_default_arithmetic(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Return a function that runs in the default floating-point mode.

    Subnormal numbers are kept, and rounding is to nearest, also in threads that it starts. The
    caller's mode is restored when the function returns.
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
