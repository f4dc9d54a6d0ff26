"""The options of run for jobs that go on when ranks are killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.launch.launchers.choice import open_mpi_5
from hvdtrain.launch.launchers.mpi_library import MpiLibrary
from hvdtrain.launch.launchers.options import (
    discovered_hosts,
    max_ranks_variables,
    min_ranks_variable,
    require_tolerance,
)
from hvdtrain.launch.launchers.request import LaunchRequest, Site


def test_mpirun_is_told_to_tolerate_failures() -> None:
    site = Site("mpirun", "openmpi", {})
    words = open_mpi_5(LaunchRequest(("program",), ranks=3, elastic=True), site).argv
    assert words[1:6] == ("--with-ft", "ulfm", "--prtemca", "state_base_recoverable", "1")
    assert "--with-ft" not in open_mpi_5(LaunchRequest(("program",), ranks=3), site).argv


@pytest.mark.parametrize(
    ("vendor", "version", "launcher", "message"),
    [
        ("mpich", "4.3.2", "mpirun", "has ULFM, but this is MPICH 4.3.2"),
        ("openmpi", "4.1.4", "mpirun", "needs Open MPI 5, which has ULFM"),
        ("openmpi", "5.0.11", "srun", "srun ends the job with the first rank that is killed"),
    ],
)
def test_what_cannot_go_on_is_refused(
    vendor: str, version: str, launcher: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        require_tolerance(MpiLibrary(vendor, version, None), launcher)
    require_tolerance(MpiLibrary("openmpi", "5.0.11", None), "mpirun")


def test_the_least_number_of_ranks() -> None:
    assert min_ranks_variable(None, 4, False) == {}
    assert min_ranks_variable(2, None, True) == {"HVDTRAIN_MIN_RANKS": "2"}
    with pytest.raises(UsageError, match="--min-np 2 goes with --elastic"):
        min_ranks_variable(2, 4, False)
    with pytest.raises(UsageError, match="--min-np 5 is more than -np 4"):
        min_ranks_variable(5, 4, True)


def test_the_greatest_number_of_ranks(tmp_path: Path) -> None:
    assert max_ranks_variables(None, None, 4, False) == {}
    assert max_ranks_variables(4, None, 4, True) == {"HVDTRAIN_MAX_RANKS": "4"}
    assert max_ranks_variables(4, str(tmp_path / "hosts"), None, True) == {
        "HVDTRAIN_MAX_RANKS": "4",
        "HVDTRAIN_HOST_DISCOVERY": str(tmp_path / "hosts"),
    }
    with pytest.raises(UsageError, match="--max-np 4 goes with --elastic"):
        max_ranks_variables(4, None, 4, False)
    with pytest.raises(UsageError, match="--max-np 3 is less than -np 4"):
        max_ranks_variables(3, None, 4, True)
    with pytest.raises(UsageError, match=r"hosts\.sh: give --max-np M as well"):
        max_ranks_variables(None, "hosts.sh", 4, True)


def test_hosts_come_from_a_discovery_script(tmp_path: Path) -> None:
    program = tmp_path / "hosts"
    program.write_text("#!/bin/sh\necho node1:2\necho node2\necho node3:0\n")
    program.chmod(0o755)
    assert discovered_hosts(str(program)) == "node1:2,node2:1"
    program.write_text("#!/bin/sh\necho no >&2\nexit 3\n")
    with pytest.raises(UsageError, match="failed with exit code 3: no"):
        discovered_hosts(str(program))
    program.write_text("#!/bin/sh\n")
    with pytest.raises(UsageError, match="names no host"):
        discovered_hosts(str(program))
