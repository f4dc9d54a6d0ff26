"""Libraries that Horovod scripts ask for: which are built in, which are in use. All are local."""

from __future__ import annotations

import importlib.util

import tensorflow as tf

from hvdtrain.core.horovod_api import (
    ccl_built,
    ddl_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
)

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


def gloo_built() -> bool:
    """Return whether torch, which brings Gloo, is installed."""
    return importlib.util.find_spec("torch") is not None


def nccl_built() -> int:
    """Return NCCL's version: 0, since tensors of TensorFlow go through host memory."""
    return 0


def cuda_built() -> bool:
    """Return whether TensorFlow was built with CUDA."""
    return bool(tf.test.is_built_with_cuda())


def rocm_built() -> bool:
    """Return whether TensorFlow was built with ROCm."""
    return bool(tf.test.is_built_with_rocm())
