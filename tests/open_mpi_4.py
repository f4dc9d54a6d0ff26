"""The Open MPI 4 of Debian, for which `make test` makes an environment where it is installed."""

from __future__ import annotations

import os

import pytest

__all__ = ["OPEN_MPI_4"]

# A parameter for tests: the name that launch() takes.
OPEN_MPI_4 = pytest.param(
    "openmpi4",
    marks=pytest.mark.skipif(
        not os.environ.get("HVDTRAIN_OPENMPI4_PYTHON"),
        reason="HVDTRAIN_OPENMPI4_PYTHON names no environment, as 'make test' makes it where "
        "Debian's openmpi-bin is Open MPI 4",
    ),
)
