"""What a person writes for `run`, and which launcher it chooses."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from hvdtrain.cli.run import command
from hvdtrain.errors import UsageError
from hvdtrain.launch.hosts.host import Host
from hvdtrain.launch.launchers.choice import (
    Launcher,
    choose_launcher,
    intel_mpi,
    mpich,
    open_mpi_4,
    open_mpi_5,
    own_builder,
    srun,
)
from hvdtrain.launch.launchers.mpi_library import MpiLibrary
from hvdtrain.launch.launchers.options import (
    check_interface,
    parse_exports,
    parse_folder,
    parse_hosts,
    with_hosts,
)
from hvdtrain.launch.launchers.request import LaunchRequest

TWO = (Host("a", 2), Host("b", 2))


def test_what_a_person_writes() -> None:
    assert parse_hosts("a:2,b") == (Host("a", 2), Host("b", 1))
    assert parse_exports(["A", "B=1=2", "C="], {"A": ""}) == {"A": None, "B": "1=2", "C": ""}
    assert parse_folder(None) is None
    assert parse_folder("logs") == str(Path("logs").absolute())
    for wrong in ("a:x", "a b", "a slots=2", "a:2 user=me", "", ",", "name_of_node1:2"):
        with pytest.raises(UsageError, match="-H"):
            parse_hosts(wrong)
    for wrong in ("1A=2", "", "=1", "UNSET"):
        with pytest.raises(UsageError, match="-x "):
            parse_exports([wrong], {})
    for wrong in ("", "a%b"):
        with pytest.raises(UsageError, match="--output-dir"):
            parse_folder(wrong)
    check_interface("lo")
    with pytest.raises(UsageError, match="--interface nowhere0: this host has lo"):
        check_interface("lo,nowhere0")


def test_hosts_of_a_job_that_open_mpi_does_not_know(tmp_path: Path) -> None:
    own, two = Launcher("mpirun", "L", open_mpi_5), LaunchRequest(("PROGRAM",), ranks=4)
    (tmp_path / "pe").write_text("a 2 all.q@a UNDEFINED\nb 2 all.q@b UNDEFINED\n")
    jobs = [{"PE_HOSTFILE": str(tmp_path / "pe")}, {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a 2 b 2"}]
    for environ in jobs:
        assert with_hosts(two, own, "openmpi", environ).hosts == TWO
        assert with_hosts(two, own, "mpich", environ).hosts == ()
        named = replace(two, hosts=TWO[:1], ranks=2)
        assert with_hosts(named, own, "openmpi", environ).hosts == TWO[:1]
    with pytest.raises(UsageError, match="this is not a job of lsf"):
        with_hosts(two, own, "openmpi", {"LSB_JOBID": "7"})


def test_more_ranks_than_slots(tmp_path: Path) -> None:
    own = Launcher("mpirun", "L", open_mpi_5)
    many = LaunchRequest(("PROGRAM",), ranks=5, hosts=TWO)
    with pytest.raises(UsageError, match="-H: 5 ranks need more than the 4 slots of a 2, b 2"):
        with_hosts(many, own, "openmpi", {})
    assert with_hosts(many, own, "mpich", {}) == many
    assert with_hosts(many, own, "openmpi", {"OMPI_MCA_rmaps_base_oversubscribe": "1"}) == many
    with pytest.raises(UsageError, match="-np 5 is more than --per-node 2 allows: 4"):
        with_hosts(LaunchRequest(("P",), ranks=5, hosts=TWO, per_node=2), own, "openmpi", {})
    (tmp_path / "few").write_text("a slots=2\nb slots=1\n")
    few = LaunchRequest(("P",), hostfile=str(tmp_path / "few"), per_node=2)
    with pytest.raises(UsageError, match="few: 'b': --per-node 2 needs slots=2 there"):
        with_hosts(few, own, "openmpi", {})
    more = LaunchRequest(("P",), ranks=5, per_node=2)
    with pytest.raises(UsageError, match="allows: 2"):
        with_hosts(more, own, "openmpi", {})
    assert with_hosts(more, own, "openmpi", {"SLURM_JOB_ID": "1"}) == more
    assert with_hosts(more, Launcher("srun", "L", srun), "openmpi", {}) == more
    (tmp_path / "hosts").write_text("a:2\nb:2\n")
    file = LaunchRequest(("P",), ranks=4, hostfile=str(tmp_path / "hosts"))
    assert with_hosts(file, Launcher("srun", "L", srun), "openmpi", {}).hosts == TWO


def test_the_page_tells_of_every_option() -> None:
    page = Path(__file__).parents[3] / "docs" / "cluster.md"
    described = re.findall(r"^\| `(-[\w-]+)", page.read_text(), re.MULTILINE)
    offered = [parameter.opts[0] for parameter in command.params if parameter.name != "arguments"]
    assert set(offered) == set(described)


def test_the_launcher_of_the_mpi_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    nowhere = MpiLibrary("Cray MPI", "8.0", None)
    with pytest.raises(UsageError, match="does not know how to start ranks with Cray MPI"):
        choose_launcher(None, nowhere, {"SLURM_JOB_ID": "1"})
    with pytest.raises(UsageError, match="there is no srun on PATH"):
        choose_launcher("srun", nowhere, {})
    assert choose_launcher("srun", nowhere, {}, missing_ok=True).path == "srun"
    for program in ("srun", "mpiexec"):
        (tmp_path / program).write_text("#!/bin/sh\necho nothing\n")
        (tmp_path / program).chmod(0o755)
    found = choose_launcher(None, nowhere, {"SLURM_JOB_ID": "1"})
    assert (found.name, found.path, found.build) == ("srun", str(tmp_path / "srun"), srun)
    with pytest.raises(UsageError, match="no mpiexec on PATH that belongs to pals"):
        choose_launcher("pals", nowhere, {})
    for vendor, version, builder in (
        ("openmpi", "4.1.4", open_mpi_4),
        ("openmpi", "5.0.11", open_mpi_5),
        ("mpich", "4.0", mpich),
        ("intelmpi", "2021.9", intel_mpi),
    ):
        assert own_builder(MpiLibrary(vendor, version, None)) is builder
