"""Parameters of tests that start ranks with an MPI that not every machine has."""

import os

import pytest

# As launch() names them.
MPICH = pytest.param("mpich", marks=pytest.mark.mpich)
# Debian's, for which make builds an environment where it is installed.
OPEN_MPI_4 = pytest.param(
    "openmpi4",
    marks=[
        pytest.mark.openmpi4,
        pytest.mark.skipif(
            not os.environ.get("HVDTRAIN_OPENMPI4_PYTHON"),
            reason="HVDTRAIN_OPENMPI4_PYTHON names no environment, as 'make test-all' makes it "
            "where Debian's openmpi-bin is Open MPI 4",
        ),
    ],
)
