"""The mpirun command line, for each MPI."""

from __future__ import annotations

import shlex

import pytest

from hvdtrain.launch.launchers.choice import mpirun_command
from hvdtrain.launch.launchers.request import LaunchCommand

PROGRAM = ["python", "-m", "hvdtrain"]
QUICK = {"OMPI_MCA_btl": "^ofi", "OMPI_MCA_mtl": "^ofi"}
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def build(
    vendor: str = "openmpi",
    ranks: int | None = 4,
    hostfile: str | None = None,
    environ: dict[str, str] | None = None,
    root: bool = False,
) -> LaunchCommand:
    """Build a command line with these and otherwise plain arguments."""
    return mpirun_command(
        "/bin/mpirun",
        vendor,
        PROGRAM,
        ranks=ranks,
        hostfile=hostfile,
        environ=environ or {},
        root=root,
    )


def test_open_mpi_with_a_hostfile_keeps_slots_and_network() -> None:
    line = build(hostfile="hosts")
    assert shlex.join(line.argv) == (
        "/bin/mpirun --bind-to none -hostfile hosts -np 4 python -m hvdtrain"
    )
    assert line.variables == {}


def test_open_mpi_forwards_what_decides_about_results() -> None:
    environ = {
        "HVDTRAIN_BUCKET_BYTES": "1",
        "HOROVOD_FUSION_THRESHOLD": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": "/lib",
        "NCCL_DEBUG": "INFO",
        "AWS_SECRET_ACCESS_KEY": "hidden",
        "HOME": "/root",
    }
    argv = build(hostfile="hosts", environ=environ).argv
    forwarded = {argv[at + 1] for at, word in enumerate(argv) if word == "-x"}
    assert forwarded == set(environ) - {"AWS_SECRET_ACCESS_KEY", "HOME"}
    assert "-x" not in build(environ=environ).argv


@pytest.mark.parametrize("variable", ["SLURM_JOB_ID", "PBS_NODEFILE", "LSB_JOBID"])
def test_open_mpi_in_an_allocation_may_span_hosts(variable: str) -> None:
    line = build(environ={variable: "1"})
    assert "--oversubscribe" not in line.argv
    assert line.variables == {}


def test_open_mpi_lets_root_run_only_when_it_is_root() -> None:
    assert build(root=True, hostfile="hosts").variables == ROOT
    assert build(root=True).variables == ROOT | QUICK


def test_variables_of_the_user_stay() -> None:
    assert build(environ={"OMPI_MCA_btl": "self,tcp"}).variables == {"OMPI_MCA_mtl": "^ofi"}


def test_the_line_can_be_pasted() -> None:
    line = LaunchCommand(("mpirun", "python", "a b.py", "$HOME"), {"A": "^x", "B": "1 2"})
    assert shlex.split(line.shell()) == ["env", "A=^x", "B=1 2", *line.argv]
    assert LaunchCommand(("mpirun", "python")).shell() == "mpirun python"
