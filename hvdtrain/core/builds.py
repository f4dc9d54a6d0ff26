"""What Horovod scripts ask about how it was built, for all frameworks. All are local."""

from __future__ import annotations

import importlib.util

from hvdtrain.core import context

__all__ = [
    "ccl_built",
    "ddl_built",
    "gloo_enabled",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
]


def mpi_built() -> bool:
    """Return whether the mpi engine can be used here, as far as installed packages tell."""
    return importlib.util.find_spec("mpi4py") is not None


def mpi_enabled() -> bool:
    """Return whether MPI moves the bytes; False before init()."""
    return _moves_bytes("mpi")


def mpi_threads_supported() -> bool:
    """Return whether several threads may communicate at once."""
    return context.current().world.communicator.capabilities.concurrent


def gloo_enabled() -> bool:
    """Return whether Gloo moves the bytes; False before init()."""
    return _moves_bytes("gloo")


def ddl_built() -> bool:
    """Return whether IBM DDL is there: it never is."""
    return False


def ccl_built() -> bool:
    """Return whether Intel oneCCL is there: it never is."""
    return False


def _moves_bytes(engine: str) -> bool:
    return context.is_initialized() and context.current().engine_name == engine
