"""Every engine fulfils the contract at 1 to 4 ranks, under Open MPI and under MPICH."""

import sys
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest
import torch
from contract_special import SPECIAL_TYPES, expected_of
from horovod_environment import horovod_python
from hosts import on_hosts
from mpis import MPICH, OPEN_MPI_4
from ranks import run_ranks, start
from shared_launch import SharedLaunch, results_of

from hvdtrain.types import DType, ReduceOp

WORKER = Path(__file__).parent / "contract_worker.py"
DOCS = Path(__file__).resolve().parents[2] / "docs"

# How many cases of the table each engine runs and refuses; a number that sinks is a loss.
# Ranks of one node, and only they, reduce halves in shared memory.
TAKEN = {
    "local": 471, "mpi": 392, "node": 444, "gloo": 445, "hidden": 445, "nccl": 451, "horovod": 445,
}  # fmt: skip
REFUSED = {"local": 9, "mpi": 88, "node": 36, "gloo": 35, "hidden": 35, "nccl": 29, "horovod": 35}


# In one launch for each number of ranks. mpi-hidden has MPI take the memory of a device, as where
# the library takes that of a GPU.
WITHOUT_KERNEL = ["mpi SHARED_MEMORY=numpy", "mpi CHUNK_BYTES=1000 SHARED_MEMORY=0"]
LAUNCHES = {
    np: SharedLaunch(WORKER, np, cases, warm="torch")
    for np, cases in {
        1: ["mpi", "gloo", "hidden", "mpi-hidden"],
        2: ["mpi", "mpi SHARED_MEMORY=0", *WITHOUT_KERNEL, "gloo", "hidden", "mpi-hidden"],
        3: ["mpi", "gloo"],
        4: ["mpi"],  # only shared memory adds in another way where ranks are a power of two
    }.items()
}
OTHERS = {
    np: SharedLaunch(WORKER, np, cases, warm="torch")
    for np, cases in {
        3: ["mpi SHARED_MEMORY=0", *WITHOUT_KERNEL, "hidden", "mpi-hidden"],
        4: ["mpi SHARED_MEMORY=0", "gloo", "hidden", "mpi-hidden"],
    }.items()
}


def _check(results: list[dict[str, int]], engine: str) -> None:
    expected = {"taken": TAKEN[engine], "refused": REFUSED[engine], "size": len(results)}
    assert results == [expected] * max(len(results), 1)


def _kind(case: str, np: int) -> str:
    """Return whose counts a case has: ranks of one node meet in shared memory, where they may."""
    if case in ("mpi", "mpi-hidden"):
        return "node" if np > 1 else "mpi"
    return case.split()[0]


def test_the_page_says_what_the_contract_demands() -> None:
    """Of two ranks, in a table whose rows the contract has, too."""
    text = (DOCS / "numerics.md").read_text()
    lines = text.partition("<!-- checked by tests/engines/test_engines.py -->")[2].splitlines()
    header, _, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in takewhile(bool, lines[1:])
    )
    numbers = {"denormal": SPECIAL_TYPES[DType.FLOAT64], "any": 1.0}
    for values, *cells in rows:
        one, other = (numbers.get(word) or float(word) for word in values.split(" and "))
        for name, cell in zip(header[1:], cells, strict=True):
            reduced = expected_of(np.array([one]), np.array([other]), 2, ReduceOp(name.lower()))
            said = [numbers.get(word) or float(word) for word in cell.split(" or ")]
            assert repr(float(reduced[0])) in map(repr, said), (values, name)


def test_local() -> None:
    _check(SharedLaunch(WORKER, 1, ["local"]).results("local"), "local")


@pytest.mark.parametrize(
    ("np", "case"), [(np, case) for np, launched in LAUNCHES.items() for case in launched.cases]
)
def test_open_mpi_and_gloo(np: int, case: str) -> None:
    _check(LAUNCHES[np].results(case), _kind(case, np))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("np", "case"), [(np, case) for np, launched in OTHERS.items() for case in launched.cases]
)
def test_other_engines(np: int, case: str) -> None:
    _check(OTHERS[np].results(case), _kind(case, np))


@pytest.mark.parametrize("np", [1, 2, 3, 4])
@pytest.mark.parametrize("mpi", [OPEN_MPI_4, MPICH])
def test_other_mpis(mpi: str, np: int) -> None:
    _check(SharedLaunch(WORKER, np, ["mpi"], mpi=mpi).results("mpi"), _kind("mpi", np))


@pytest.mark.parametrize(
    ("mpi", "slots"),
    [("openmpi", [2, 1, 1]), pytest.param("mpich", [2, 1], marks=pytest.mark.mpich)],
)
def test_mpi_on_several_nodes(mpi: str, slots: list[int], tmp_path: Path) -> None:
    how = on_hosts(tmp_path, mpi, slots)
    _check(SharedLaunch(WORKER, sum(slots), ["mpi"], mpi=mpi, **how).results("mpi"), "mpi")


def test_gloo_under_torchrun() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    with start([*torchrun, 2, WORKER, "gloo"]) as job:
        job.ended(code=0)
        _check(results_of(job, 2, 0) or [], "gloo")


@pytest.mark.gpu
@pytest.mark.parametrize("np", [1, 2, 3, 4])
def test_nccl(np: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    _check(SharedLaunch(WORKER, np, ["nccl"]).results("nccl"), "nccl")


@pytest.mark.horovod
@pytest.mark.parametrize("np", [1, 2, 3, 4])
def test_horovod(np: int) -> None:
    launched = SharedLaunch(WORKER, np, ["horovod"], python=horovod_python())
    _check(launched.results("horovod"), "horovod")


@pytest.mark.horovod
def test_horovod_in_small_chunks() -> None:
    env = {"HVDTRAIN_CHUNK_BYTES": 5000, "HOROVOD_CYCLE_TIME": 0.1}
    launched = SharedLaunch(WORKER, 3, ["horovod"], python=horovod_python(), env=env)
    _check(launched.results("horovod"), "horovod")


@pytest.mark.soak
def test_broadcast_of_more_than_2_to_the_31_bytes() -> None:
    """The most that one MPI count can say."""
    code = """
import os
import numpy as np
from hvdtrain.buffer import Buffer
from hvdtrain.config import Config
from hvdtrain.engines import open_world
count = (2**31 + 2**20) // 8
communicator = open_world("mpi", Config.from_environ(os.environ), os.environ).communicator
array = np.arange(count) if communicator.rank == 1 else np.full(count, -1, np.int64)
communicator.broadcast(Buffer.from_array(array), 1)
assert (array[0], array[-1], array.sum()) == (0, count - 1, count * (count - 1) // 2)
"""
    run_ranks(["-c", code], 2)


WITHOUT_GLOO = "import torch.distributed as d; d.is_backend_available = lambda _: False"


@pytest.mark.parametrize(
    ("engine", "hide", "message"),
    [
        ("mpi", "sys.modules['mpi4py'] = None", "needs mpi4py: pip install"),
        ("gloo", "sys.modules['torch'] = None", "needs PyTorch: pip install torch"),
        ("gloo", WITHOUT_GLOO, "is not in this build of PyTorch"),
        ("horovod", "sys.modules['horovod'] = None", "needs horovod: python -m hvdtrain build-"),
        ("horovod", "sys.modules['torch'] = None", "needs torch: pip install torch, then python"),
    ],
)
def test_an_engine_that_is_not_installed_is_refused(engine: str, hide: str, message: str) -> None:
    code = f"import sys; {hide}\nfrom hvdtrain.core import context; context.init({engine!r})"
    done = start([sys.executable, "-c", code]).end(code=2)
    assert done.stderr.startswith(f"hvdtrain: engine {engine} {message}")
    assert len(done.stderr.splitlines()) == 1
