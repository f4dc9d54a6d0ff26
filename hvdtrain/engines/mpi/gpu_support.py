"""Queries of an MPI library's GPU support, without importing mpi4py."""

from __future__ import annotations

import ctypes

# Query functions of Open MPI, MPICH, MVAPICH and others.
_QUERIES = {
    "CUDA": ("MPIX_Query_cuda_support",),
    "ROCm": ("MPIX_Query_rocm_support", "MPIX_Query_hip_support"),
}
# The query function of Cray's MPICH, and its arguments.
_GENERAL_QUERY = "MPIX_GPU_query_support"
_GENERAL_NUMBERS = {"CUDA": 0, "ROCm": 2}


def gpu_kinds(library: object) -> tuple[str, ...]:
    """Return the kinds of GPU ("CUDA", "ROCm") whose memory an MPI library supports.

    Call it after MPI_Init, in which Open MPI selects its components.
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
