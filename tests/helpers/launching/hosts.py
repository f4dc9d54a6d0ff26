"""Several host names on this machine, without ssh."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

AGENT = Path(__file__).resolve().with_name("agent.sh")

# How each MPI is told by arguments to use another remote shell.
AGENT_ARGS = {
    # Like any user of ssh, the test has to say which variables the ranks need.
    "openmpi": ["--prtemca", "plm_ssh_agent", AGENT, "-x", "PYTHONPATH"],
    "openmpi4": ["--mca", "plm_rsh_agent", AGENT, "-x", "PYTHONPATH"],
    "mpich": ["-launcher", "ssh", "-launcher-exec", AGENT],
}
# How each MPI is told by variables to use another remote shell.
AGENT_VARIABLES: dict[str, dict[str, object]] = {
    "openmpi": {"PRTE_MCA_plm_ssh_agent": AGENT},
    "openmpi4": {"OMPI_MCA_plm_rsh_agent": AGENT},
    "mpich": {"HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": AGENT},
}


def require_hosts() -> None:
    """Skip the test where this user may not make namespaces, which the stand-in hosts are."""
    tried = subprocess.run(
        [AGENT, "nodea", "true"], capture_output=True, text=True, timeout=600, check=False
    )
    if tried.returncode != 0:
        pytest.skip(f"no host names of its own for a process here: {tried.stderr.strip()}")


def write_hostfile(path: Path, mpi: str, slots: Sequence[int]) -> Path:
    form = "node{}:{}\n" if mpi == "mpich" else "node{} slots={}\n"
    path.write_text("".join(form.format(node, count) for node, count in enumerate(slots)))
    return path


def on_hosts(folder: Path, mpi: str, slots: Sequence[int], *more: object) -> dict[str, Any]:
    """Return what has launch() start so many ranks on node0, node1, ..., with more arguments."""
    require_hosts()
    hostfile = write_hostfile(folder / "hosts", mpi, slots)
    return {"hostfile": hostfile, "launcher_args": [*AGENT_ARGS[mpi], *more]}
