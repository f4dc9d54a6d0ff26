"""Every engine fulfils the contract at 1 to 4 ranks, under Open MPI and under MPICH."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from horovod_environment import horovod_python
from hosts import AGENT_ARGS, require_hosts, write_hostfile
from open_mpi_4 import OPEN_MPI_4
from ranks import launch, run_ranks, start

WORKER = Path(__file__).parent / "contract_worker.py"

# How many cases of the table each engine runs and refuses; a number that sinks is a loss.
# Ranks of one node, and only they, reduce halves in shared memory.
TAKEN = {
    "local": 453,
    "mpi": 381,
    "node": 425,
    "gloo": 427,
    "hidden": 427,
    "nccl": 433,
    "horovod": 427,
}
REFUSED = {"local": 8, "mpi": 80, "node": 36, "gloo": 34, "hidden": 34, "nccl": 28, "horovod": 34}


def _check(results: list[list[dict[str, int]]], *engines: str) -> None:
    expected = [
        {"taken": TAKEN[engine], "refused": REFUSED[engine], "size": len(results)}
        for engine in engines
    ]
    assert results == [expected] * len(results)


def test_local() -> None:
    _check(run_ranks(WORKER, 1, args=["local"]).results, "local")


@pytest.mark.parametrize("np", [1, 2, 3, 4])
@pytest.mark.parametrize("mpi", ["openmpi", OPEN_MPI_4, "mpich"])
def test_mpi(mpi: str, np: int) -> None:
    # The second time in memory of a device, as where the library takes that of a GPU.
    engines = "mpi+mpi-hidden" if mpi == "openmpi" else "mpi"
    done = run_ranks(WORKER, np, args=[engines], mpi=mpi, timeout_seconds=180)
    _check(done.results, *["node" if np > 1 else "mpi"] * len(engines.split("+")))


@pytest.mark.parametrize(
    ("mpi", "slots"),
    [("openmpi", [2, 1, 1]), ("mpich", [2, 1])],
)
def test_mpi_on_several_nodes(mpi: str, slots: list[int], tmp_path: Path) -> None:
    require_hosts()
    done = run_ranks(
        WORKER,
        sum(slots),
        args=["mpi"],
        mpi=mpi,
        hostfile=write_hostfile(tmp_path / "hosts", mpi, slots),
        launcher_args=AGENT_ARGS[mpi],
        timeout_seconds=180,
    )
    _check(done.results, "mpi")


@pytest.mark.parametrize(
    ("shared_memory", "np"), [("0", 2), ("0", 3), ("0", 4), ("numpy", 2), ("numpy", 3)]
)
def test_mpi_without_the_kernel(shared_memory: str, np: int) -> None:
    env = {"HVDTRAIN_SHARED_MEMORY": shared_memory}
    done = run_ranks(WORKER, np, args=["mpi"], env=env, timeout_seconds=120)
    _check(done.results, "mpi")


@pytest.mark.parametrize("np", [1, 2, 3, 4])
def test_gloo_and_memory_that_the_host_cannot_read(np: int) -> None:
    done = run_ranks(WORKER, np, args=["gloo+hidden"], timeout_seconds=240)
    _check(done.results, "gloo", "hidden")


def test_gloo_under_torchrun() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    with start([*torchrun, 2, WORKER, "gloo"]) as job:
        done = job.wait(120)
        if done.returncode != 0:
            job.fail(f"exit code {done.returncode}")
        job.assert_nothing_left()
        _check(job.results(2), "gloo")


@pytest.mark.gpu
@pytest.mark.parametrize("np", [1, 2, 3, 4])
def test_nccl(np: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    _check(run_ranks(WORKER, np, args=["nccl"], timeout_seconds=180).results, "nccl")


@pytest.mark.parametrize("np", [1, 2, 3, 4])
def test_horovod(np: int) -> None:
    python = horovod_python()
    done = run_ranks(WORKER, np, args=["horovod"], python=python, timeout_seconds=180)
    _check(done.results, "horovod")


def test_horovod_in_small_chunks() -> None:
    env = {"HVDTRAIN_CHUNK_BYTES": 5000, "HOROVOD_CYCLE_TIME": 0.1}
    python = horovod_python()
    done = run_ranks(WORKER, 3, args=["horovod"], python=python, env=env, timeout_seconds=180)
    _check(done.results, "horovod")


@pytest.mark.parametrize("np", [2, 3])
def test_mpi_in_chunks_of_a_few_elements(np: int) -> None:
    env = {"HVDTRAIN_CHUNK_BYTES": 1000, "HVDTRAIN_SHARED_MEMORY": 0}
    done = run_ranks(WORKER, np, args=["mpi"], env=env, timeout_seconds=120)
    _check(done.results, "mpi")


def test_broadcast_of_more_than_2_to_the_31_bytes() -> None:
    done = run_ranks(WORKER.parent / "large_worker.py", 2, timeout_seconds=120)
    assert all(nbytes > 2**31 for nbytes in done.results)


@pytest.mark.parametrize(
    ("fault", "caught_by"),
    [
        ("identity", "allreduce sum"),
        ("times size", "allreduce sum"),
        ("forgets a rank", "allreduce sum"),
        ("wrong root", "broadcast from the first"),
        ("one call late", "allreduce sum"),
    ],
)
def test_a_broken_engine_fails(fault: str, caught_by: str) -> None:
    with launch(WORKER, 3, args=["mpi", fault]) as job:
        done = job.wait(60)
    assert done.returncode != 0
    assert f"of 3, {caught_by}" in done.stderr


@pytest.mark.parametrize(
    ("engine", "module", "message"),
    [
        ("mpi", "mpi4py", "engine mpi needs mpi4py: pip install"),
        ("horovod", "horovod", "engine horovod needs horovod: python -m hvdtrain build-horovod"),
        ("horovod", "torch", "engine horovod needs torch: pip install torch, then python -m"),
    ],
)
def test_an_engine_that_is_not_installed_is_refused(engine: str, module: str, message: str) -> None:
    code = (
        f"import sys; sys.modules[{module!r}] = None\n"
        f"import hvdtrain.core.context as context; context.init({engine!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith(f"hvdtrain: {message}")
    assert "Traceback" not in done.stderr
