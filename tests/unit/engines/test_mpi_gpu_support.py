"""Which GPUs' memory an MPI library takes: asked of those that are here, and of made-up ones."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from mpis import MPICH, OPEN_MPI_4
from ranks import mpi_python

from hvdtrain.engines.mpi.gpu import gpu_kinds

CODE = """
import ctypes, json
from hvdtrain.engines.mpi.gpu import gpu_kinds
from mpi4py import MPI
library = ctypes.CDLL(MPI.__file__)
asked = [name for name in %r if hasattr(library, name)]
print(json.dumps([gpu_kinds(library), asked]))
"""
QUERIES = {
    "openmpi": ["MPIX_Query_cuda_support", "MPIX_Query_rocm_support"],
    "openmpi4": ["MPIX_Query_cuda_support"],
    "mpich": ["MPIX_Query_cuda_support", "MPIX_Query_hip_support", "MPIX_GPU_query_support"],
}
EVERY = sorted({name for names in QUERIES.values() for name in names})


@pytest.mark.parametrize("mpi", ["openmpi", OPEN_MPI_4, MPICH])
def test_libraries_without_gpus_say_so(mpi: str) -> None:
    done = subprocess.run(
        [mpi_python(mpi), "-c", CODE % EVERY],
        env={**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    kinds, asked = json.loads(done.stdout.splitlines()[-1])
    assert kinds == []
    assert sorted(asked) == sorted(
        QUERIES[mpi]
    )  # it is their word, not that there is nobody to ask


def _cray(kind: ctypes.c_int, answer: Any) -> int:
    ctypes.cast(answer, ctypes.POINTER(ctypes.c_int))[0] = int(kind.value == 2)
    return 0


def _fails(kind: ctypes.c_int, answer: Any) -> int:
    _cray(kind, answer)
    return 1


@pytest.mark.parametrize(
    ("functions", "kinds"),
    [
        ({}, ()),
        ({"MPIX_Query_cuda_support": lambda: 1}, ("CUDA",)),
        ({"MPIX_Query_cuda_support": lambda: 0, "MPIX_Query_rocm_support": lambda: 1}, ("ROCm",)),
        ({"MPIX_Query_hip_support": lambda: 1}, ("ROCm",)),
        ({"MPIX_GPU_query_support": _cray}, ("ROCm",)),
        ({"MPIX_GPU_query_support": _fails}, ()),
        ({"MPIX_Query_hip_support": lambda: 0, "MPIX_GPU_query_support": _cray}, ()),
    ],
)
def test_every_way_to_ask(functions: dict[str, Callable[..., int]], kinds: tuple[str, ...]) -> None:
    assert gpu_kinds(SimpleNamespace(**functions)) == kinds
