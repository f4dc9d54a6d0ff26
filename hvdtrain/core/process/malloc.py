"""Memory that the C library keeps when it is freed: new tensors then cost no page faults."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

__all__ = ["keep_freed_memory", "keep_large_memory"]

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_KEPT_BYTES = 256 << 20
# Larger pieces come from the system and go back to it; glibc takes no larger value.
_LARGEST_BYTES = 32 << 20
_INT_MAX = (1 << 31) - 1

_USERS_WORDS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory(environ: Mapping[str, str]) -> bool:
    """Have glibc keep up to 256 MiB of freed memory for the next tensors (local, for good).

    By itself it gives back more than twice the largest piece that was freed so far. A gradient
    is freed as soon as it lies in its bucket, and would come back page by page in the next step.

    Args:
        environ: where the user has set malloc there, it stays as it is.

    Returns:
        Whether the C library took it.
    """
    return _set(
        {_M_TRIM_THRESHOLD: _KEPT_BYTES, _M_MMAP_THRESHOLD: _LARGEST_BYTES},
        environ,
    )


def keep_large_memory(nbytes: int, environ: Mapping[str, str]) -> bool:
    """Have glibc keep freed memory of any piece's size, `nbytes` more of it (local, for good).

    XLA takes the memory of a whole step in one piece, which keep_freed_memory() alone gives back.
    Its price: large pieces of others, too, go back to the system only when nothing lies above them.

    Args:
        nbytes: how much a step uses; more than 2 GiB at the end of the heap always go back.
        environ: where the user has set malloc there, it stays as it is.

    Returns:
        Whether the C library took it.
    """
    kept = min(_KEPT_BYTES + nbytes, _INT_MAX)
    return _set({_M_TRIM_THRESHOLD: kept, _M_MMAP_MAX: 0}, environ)


def _set(values: Mapping[int, int], environ: Mapping[str, str]) -> bool:
    libc = ctypes.CDLL(None)
    if any(word in environ for word in _USERS_WORDS) or not hasattr(libc, "gnu_get_libc_version"):
        return False
    return all(libc.mallopt(parameter, value) for parameter, value in values.items())
