"""A world that is not what the launcher promised refuses to start."""

import sys

import pytest
from ranks import mpi_python, start

INIT = "from hvdtrain.core import context; context.init(); print('started')"


@pytest.mark.parametrize(
    ("launcher", "library", "names"),
    [
        ("mpich", "openmpi", ["MPICH's or Intel's mpiexec promised 2 ranks", "Open MPI v5"]),
        ("openmpi", "mpich", ["Open MPI's mpirun promised 2 ranks", "MPICH 5"]),
    ],
)
@pytest.mark.mpich
def test_mpirun_and_libmpi_do_not_belong_together(
    launcher: str, library: str, names: list[str]
) -> None:
    mpirun = mpi_python(launcher).parent / "mpirun"
    done = start([mpirun, "-np", 2, mpi_python(library), "-c", INIT]).end(code=78)
    assert "started" not in done.stdout
    lines = [line for line in done.stderr.splitlines() if line.startswith("hvdtrain:")]
    assert len(lines) == 1
    assert all(name in lines[0] for name in names)
    assert "Traceback" not in done.stderr


MPIRUN = {"OMPI_COMM_WORLD_RANK": 0, "OMPI_COMM_WORLD_SIZE": 8}
TORCHRUN = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}


@pytest.mark.parametrize(
    ("variables", "engine", "code", "message"),
    [
        (MPIRUN, "auto", 78, "promised 8 ranks (OMPI_COMM_WORLD_SIZE=8), but engine mpi with Open"),
        (MPIRUN, "local", 2, "engine local is for one rank, but Open MPI's mpirun started 8"),
        (TORCHRUN, "mpi", 78, "torchrun promised 2 ranks (WORLD_SIZE=2)"),
    ],
)
def test_variables_of_a_launcher_around_a_single_process(
    variables: dict[str, object], engine: str, code: int, message: str
) -> None:
    env = {**variables, "HVDTRAIN_ENGINE": engine}
    done = start([sys.executable, "-c", INIT], env=env).end(code=code)
    assert done.stdout == ""
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
