"""What Horovod scripts query about its build (all local)."""

from __future__ import annotations

import torch


def gloo_built() -> bool:
    """Return whether torch was built with Gloo."""
    return torch.distributed.is_available() and torch.distributed.is_gloo_available()


def nccl_built() -> int:
    """Return the version of NCCL that torch was built with, e.g. 22703, or 0."""
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return 0
    version: tuple[int, ...] = torch.cuda.nccl.version()
    major, minor, patch = version[:3]
    return major * 10000 + minor * 100 + patch


def cuda_built() -> bool:
    """Return whether torch was built with CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether torch was built with ROCm."""
    return torch.version.hip is not None
