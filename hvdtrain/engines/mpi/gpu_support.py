"""Whether an MPI library takes pointers to memory of GPUs, by its own word."""

from __future__ import annotations

import ctypes

__all__ = ["gpu_kinds"]

# What Open MPI, MPICH, MVAPICH and others are asked, in the order of kinds.
_QUERIES = {
    "CUDA": ("MPIX_Query_cuda_support",),
    "ROCm": ("MPIX_Query_rocm_support", "MPIX_Query_hip_support"),
}
# What Cray's MPICH has instead of them, and its numbers.
_GENERAL_QUERY = "MPIX_GPU_query_support"
_GENERAL_NUMBERS = {"CUDA": 0, "ROCm": 2}


def gpu_kinds(library: object) -> tuple[str, ...]:
    """Return the kinds of GPU ("CUDA", "ROCm") whose memory an MPI library says that it takes.

    Ask it after MPI_Init, where Open MPI chooses what it uses.

    Args:
        library: a ctypes.CDLL in which MPI's functions are found, as that of mpi4py.MPI.
    """
    return tuple(kind for kind in _QUERIES if _takes(library, kind))


def _takes(library: object, kind: str) -> bool:
    for name in _QUERIES[kind]:
        query = getattr(library, name, None)
        if query is not None:
            return bool(query())
    general, answer = getattr(library, _GENERAL_QUERY, None), ctypes.c_int(0)
    if general is None:
        return False
    failed = general(ctypes.c_int(_GENERAL_NUMBERS[kind]), ctypes.byref(answer))
    return not failed and bool(answer.value)
