"""What Horovod scripts ask about how it was built. All of these are local."""

from __future__ import annotations

import importlib.util

import torch

from hvdtrain.core import context

__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
]


def mpi_built() -> bool:
    """Tell whether the mpi engine can be used here, as far as installed packages tell."""
    return importlib.util.find_spec("mpi4py") is not None


def mpi_enabled() -> bool:
    """Tell whether MPI moves the bytes; False before init()."""
    return _moves_bytes("mpi")


def mpi_threads_supported() -> bool:
    """Tell whether several threads may communicate at once."""
    return context.current().world.communicator.capabilities.concurrent


def gloo_built() -> bool:
    """Tell whether torch brings Gloo."""
    return torch.distributed.is_available() and torch.distributed.is_gloo_available()


def gloo_enabled() -> bool:
    """Tell whether Gloo moves the bytes; False before init()."""
    return _moves_bytes("gloo")


def nccl_built() -> int:
    """Return NCCL's version as torch brings it, e.g. 22703, or 0."""
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return int(major * 10000 + minor * 100 + patch)


def cuda_built() -> bool:
    """Tell whether torch was built with CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Tell whether torch was built with ROCm."""
    return torch.version.hip is not None


def ddl_built() -> bool:
    """Tell whether IBM DDL is there: it never is."""
    return False


def ccl_built() -> bool:
    """Tell whether Intel oneCCL is there: it never is."""
    return False


def _moves_bytes(engine: str) -> bool:
    return context.is_initialized() and context.current().engine_name == engine
