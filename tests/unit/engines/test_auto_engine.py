"""When "auto" takes nccl, and which GPUs' memory an MPI library takes."""

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

from hvdtrain.engines import VisibleGpus, find_visible_gpus, reason_against_nccl
from hvdtrain.engines.mpi.flat import gpu_kinds

NODES, HOSTS = (0, 0, 2, 2), ("a", "a", "b", "b")


def modules(gpus: int, *others: str, nccl: bool = True, usable: bool = True) -> dict[str, Any]:
    distributed = SimpleNamespace(is_available=lambda: True, is_nccl_available=lambda: nccl)
    cuda = SimpleNamespace(device_count=lambda: gpus, is_available=lambda: usable)
    torch = SimpleNamespace(distributed=distributed, cuda=cuda)
    return {"torch": torch} | dict.fromkeys(others)


@pytest.mark.parametrize(
    ("counts", "objection"),
    [
        *(((2, 2, 2, 2), None), ((8, 8, 2, 3), None), ((0, 0, 0, 0), ""), ((-1, -1, -1, -1), "")),
        ((2, 2, 2, 0), "rank 3 on b sees no GPU"),
        ((2, 2, -1, 2), "rank 2 has not loaded hvdtrain.torch with NCCL, but others have"),
        *(((2, 2, 1, 1), "2 ranks on b see 1 GPU"), ((4, 1, 2, 2), "2 ranks on a see 1 GPU")),
    ],
)
def test_each_rank_needs_a_gpu_of_its_own(counts: tuple[int, ...], objection: str | None) -> None:
    assert reason_against_nccl([VisibleGpus(count) for count in counts], NODES, HOSTS) == objection


def test_a_scheduler_may_have_dealt_them_out() -> None:
    apart = [VisibleGpus(1, 11), VisibleGpus(1, 12), VisibleGpus(1, 11), VisibleGpus(1, 12)]
    assert reason_against_nccl(apart, NODES, HOSTS) is None
    alike = [VisibleGpus(1, 11), VisibleGpus(1, 12), VisibleGpus(1, 11), VisibleGpus(1, 11)]
    assert reason_against_nccl(alike, NODES, HOSTS) == "2 ranks on b see 1 GPU"
    masked = reason_against_nccl([VisibleGpus(1), VisibleGpus(1, 5)], (0, 0), ("a", "a"))
    assert masked == "2 ranks on a see 1 GPU"
    assert reason_against_nccl([VisibleGpus(1, 7), VisibleGpus(1, 7)], (0, 1), ("a", "b")) is None


def test_masks_are_told_apart() -> None:
    loaded = modules(1, "hvdtrain.torch")
    masks = [
        find_visible_gpus(loaded, {"CUDA_VISIBLE_DEVICES": text}).mask for text in ("0", "1", "1")
    ]
    assert masks[0] != masks[1] == masks[2] != 0
    assert find_visible_gpus(loaded, {"HOME": "/"}) == VisibleGpus(1, 0)


def test_only_programs_with_torch_are_asked() -> None:
    assert find_visible_gpus(modules(4, "hvdtrain.torch"), {}) == VisibleGpus(4)
    assert find_visible_gpus(modules(4), {}) == VisibleGpus(-1)
    both = modules(4, "hvdtrain.torch", "hvdtrain.tensorflow")
    assert find_visible_gpus(both, {}) == VisibleGpus(-1)
    assert find_visible_gpus(modules(4, "hvdtrain.torch", nccl=False), {}) == VisibleGpus(-1)
    assert find_visible_gpus({}, {}) == VisibleGpus(-1)
    assert find_visible_gpus(modules(4, "hvdtrain.torch", usable=False), {}) == VisibleGpus(0)


CODE = """
import ctypes, json
from hvdtrain.engines.mpi.flat import gpu_kinds
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
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    kinds, asked = json.loads(done.stdout.splitlines()[-1])
    assert kinds == []
    # It is their word, not that there is nobody to ask.
    assert sorted(asked) == sorted(QUERIES[mpi])


def _cray(kind: ctypes.c_int, answer: Any) -> int:
    ctypes.cast(answer, ctypes.POINTER(ctypes.c_int))[0] = int(kind.value == 2)
    return 0


def _fails(kind: ctypes.c_int, answer: Any) -> int:
    _cray(kind, answer)
    return 1


@pytest.mark.parametrize(
    ("functions", "kinds"),
    [
        *(({}, ()), ({"MPIX_Query_cuda_support": lambda: 1}, ("CUDA",))),
        ({"MPIX_Query_cuda_support": lambda: 0, "MPIX_Query_rocm_support": lambda: 1}, ("ROCm",)),
        ({"MPIX_Query_hip_support": lambda: 1}, ("ROCm",)),
        *(({"MPIX_GPU_query_support": _cray}, ("ROCm",)), ({"MPIX_GPU_query_support": _fails}, ())),
        ({"MPIX_Query_hip_support": lambda: 0, "MPIX_GPU_query_support": _cray}, ()),
    ],
)
def test_every_way_to_ask(functions: dict[str, Callable[..., int]], kinds: tuple[str, ...]) -> None:
    assert gpu_kinds(SimpleNamespace(**functions)) == kinds
