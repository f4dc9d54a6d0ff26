"""Settings of this process: malloc's and the interpreter's, for speed, and how it computes sums."""

from __future__ import annotations

import ctypes
import math
import platform
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from typing import ParamSpec, TypeVar

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_KEPT_BYTES = 256 << 20
# Larger blocks are mapped from the system and returned to it; glibc allows no larger value.
_LARGEST_BYTES = 32 << 20
_INT_MAX = (1 << 31) - 1

_USER_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory(environ: Mapping[str, str]) -> bool:
    """Make glibc keep up to 256 MiB of freed memory for the next tensors (permanent).

    By default it returns all but twice the largest block that was ever freed. A gradient is freed
    as soon as it is in its bucket, and would be mapped page by page again in the next step.
    """
    return _set(
        {_M_TRIM_THRESHOLD: _KEPT_BYTES, _M_MMAP_THRESHOLD: _LARGEST_BYTES},
        environ,
    )


def keep_large_memory(nbytes: int, environ: Mapping[str, str]) -> bool:
    """Make glibc keep freed blocks of any size, and `nbytes` more of them (permanent).

    XLA allocates the memory of a whole step as one block, which keep_freed_memory() alone would
    return to the system. The drawback is that large blocks of other libraries are returned only if
    no block above them is in use.
    """
    kept = min(_KEPT_BYTES + nbytes, _INT_MAX)
    return _set({_M_TRIM_THRESHOLD: kept, _M_MMAP_MAX: 0}, environ)


def _set(values: Mapping[int, int], environ: Mapping[str, str]) -> bool:
    libc = ctypes.CDLL(None)
    if any(name in environ for name in _USER_VARIABLES) or not hasattr(
        libc, "gnu_get_libc_version"
    ):
        return False
    return all(libc.mallopt(parameter, value) for parameter, value in values.items())


# A thread that returns from the kernel waits this long for a busy one, several times in each
# operation; Python's default of 5 ms makes an all-reduce of 16 MiB ten times as slow. If no thread
# waits for another one, a short interval costs nothing.
LONGEST_SWITCH_SECONDS = 500e-6


def shorten_switch_interval() -> float:
    """Shorten the thread switch interval; return the previous one in seconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, LONGEST_SWITCH_SECONDS))
    return before


def restore_switch_interval(before: float) -> None:
    """Restore the thread switch interval, unless the program has changed it since."""
    if math.isclose(sys.getswitchinterval(), LONGEST_SWITCH_SECONDS, rel_tol=0.01):
        sys.setswitchinterval(before)


# Frameworks make their threads flush subnormal numbers to zero (torch.set_flush_denormal,
# TensorFlow's thread pools), and a thread inherits this mode from the one that starts it. Ranks
# whose threads differ would get different sums of equal numbers.
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
