"""The command line for each launcher, from what a person asks for."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.cli.run import command
from hvdtrain.errors import UsageError
from hvdtrain.launch.hosts.host import Host
from hvdtrain.launch.launchers.choice import LAUNCHERS, choose_launcher, own_launcher
from hvdtrain.launch.launchers.mpi_library import MpiLibrary
from hvdtrain.launch.launchers.options import (
    check_interface,
    discovered_hosts,
    limit_variables,
    parse_exports,
    parse_folder,
    parse_hosts,
    require_tolerance,
    with_hosts,
)
from hvdtrain.launch.launchers.request import LaunchCommand, LaunchRequest

KINDS = {"open mpi 4": "openmpi 4", "open mpi 5": "openmpi", "intel mpi": "intelmpi"}
VENDORS = {"mpich": "mpich", "intel mpi": "intelmpi", "pals": "mpich"}
OWN = replace(LAUNCHERS["openmpi"], path="L", vendor="openmpi")
OF_MPICH = replace(LAUNCHERS["mpich"], path="L", vendor="mpich")
SRUN = replace(LAUNCHERS["srun"], path="L", vendor="openmpi")
TWO = (Host("a", 2), Host("b", 2))
UNEQUAL = (Host("a", 2), Host("b", 1))
# What is asked for, as arguments of a request, and how each launcher says it.
LINES = Path(__file__).with_name("command_lines.txt").read_text(encoding="utf-8")
QUICK = {"OMPI_MCA_btl": "^ofi", "OMPI_MCA_mtl": "^ofi"}


def build(name: str, environ: Mapping[str, str] | None = None, **wanted: Any) -> LaunchCommand:
    request = LaunchRequest(("PROGRAM",), **wanted)
    vendor = VENDORS.get(name, "openmpi")
    launcher = replace(LAUNCHERS[KINDS.get(name, name)], path="L", vendor=vendor)
    return launcher.command(request, environ or {})


@pytest.fixture(autouse=True)
def user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)


def options(name: str, environ: Mapping[str, str] | None = None, **wanted: Any) -> str:
    line = shlex.join(build(name, environ, **wanted).argv)
    assert line.startswith("L ")
    assert line.endswith(" PROGRAM")
    return line.removeprefix("L ").removesuffix("PROGRAM").strip()


@pytest.mark.parametrize("block", LINES.split("\n\n"), ids=lambda block: block.partition("\n")[0])
def test_command_lines(block: str) -> None:
    asked, *lines = block.splitlines()
    wanted = eval(f"dict({asked})")
    for line in lines:
        names, expected = line.split(": ", 1)
        if names.endswith(" refuses"):
            with pytest.raises(UsageError) as caught:
                build(names.removesuffix(" refuses"), **wanted)
            assert str(caught.value) == expected
        else:
            assert {build(name, **wanted).shell() for name in names.split(", ")} == {expected}


def test_ranks_per_node_of_an_unknown_number_of_hosts() -> None:
    with pytest.raises(UsageError, match="--per-node 3 on how many hosts"):
        options("mpich", {"SLURM_JOB_ID": "1"}, per_node=3)


def test_one_option_for_a_variable_that_is_forwarded_and_named() -> None:
    environ = {"HVDTRAIN_ENGINE": "mpi", "SECRET": "1"}
    flags = options("open mpi 5", environ, hosts=TWO, exports={"HVDTRAIN_ENGINE": "gloo"})
    assert flags == "--bind-to none -host a:2,b:2 -x HVDTRAIN_ENGINE=gloo"


def test_intel_mpi_binds_as_the_user_has_said() -> None:
    assert options("intel mpi", {"I_MPI_PIN_DOMAIN": "numa"}, ranks=2) == "-np 2"


def test_srun_hands_on_what_sbatch_was_told() -> None:
    assert "--cpus-per-task=8" in options("srun", {"SLURM_CPUS_PER_TASK": "8"}, ranks=2)
    of_mpich = replace(SRUN, vendor="mpich")
    assert "--mpi=pmi2" in of_mpich.command(LaunchRequest(("PROGRAM",), ranks=2), {}).argv


PROGRAM = ("python", "-m", "hvdtrain")
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def mpirun(hostfile: str | None = None, environ: dict[str, str] | None = None) -> LaunchCommand:
    launcher = own_launcher(MpiLibrary("openmpi", "5.0.11", None), "/bin/mpirun")
    return launcher.command(LaunchRequest(PROGRAM, ranks=4, hostfile=hostfile), environ or {})


def test_open_mpi_forwards_what_decides_about_results() -> None:
    environ = {
        "HVDTRAIN_BUCKET_BYTES": "1", "HOROVOD_FUSION_THRESHOLD": "1", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": "/lib", "NCCL_DEBUG": "INFO", "AWS_SECRET_ACCESS_KEY": "hidden",
        "HOME": "/root",
    }  # fmt: skip
    argv = mpirun(hostfile="hosts", environ=environ).argv
    forwarded = {argv[at + 1] for at, word in enumerate(argv) if word == "-x"}
    assert forwarded == set(environ) - {"AWS_SECRET_ACCESS_KEY", "HOME"}
    assert "-x" not in mpirun(environ=environ).argv


@pytest.mark.parametrize("variable", ["SLURM_JOB_ID", "PBS_NODEFILE", "LSB_JOBID"])
def test_open_mpi_in_an_allocation_may_span_hosts(variable: str) -> None:
    line = mpirun(environ={variable: "1"})
    assert "--oversubscribe" not in line.argv
    assert line.variables == {}


def test_open_mpi_lets_root_run_only_when_it_is_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert mpirun(hostfile="hosts").variables == ROOT
    assert mpirun().variables == ROOT | QUICK


def test_variables_of_the_user_stay() -> None:
    assert mpirun(environ={"OMPI_MCA_btl": "self,tcp"}).variables == {"OMPI_MCA_mtl": "^ofi"}


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
    two = LaunchRequest(("PROGRAM",), ranks=4)
    (tmp_path / "pe").write_text("a 2 all.q@a UNDEFINED\nb 2 all.q@b UNDEFINED\n")
    jobs = [{"PE_HOSTFILE": str(tmp_path / "pe")}, {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a 2 b 2"}]
    for environ in jobs:
        assert with_hosts(two, OWN, environ).hosts == TWO
        assert with_hosts(two, OF_MPICH, environ).hosts == ()
        assert with_hosts(replace(two, hosts=TWO[:1], ranks=2), OWN, environ).hosts == TWO[:1]
    (tmp_path / "oar").write_text("a\na\nb\nb\n")
    oar = {"OAR_NODEFILE": str(tmp_path / "oar")}
    for launcher in (OWN, OF_MPICH, replace(LAUNCHERS["intelmpi"], path="L", vendor="intelmpi")):
        asked = with_hosts(two, launcher, oar)
        assert asked.hosts == TWO
        assert launcher.command(asked, oar).argv[1:].count("-host" + "s" * (launcher != OWN)) == 1
    with pytest.raises(UsageError, match="this is not a job of lsf"):
        with_hosts(two, OWN, {"LSB_JOBID": "7"})


def test_more_ranks_than_slots(tmp_path: Path) -> None:
    many = LaunchRequest(("PROGRAM",), ranks=5, hosts=TWO)
    with pytest.raises(UsageError, match="-H: 5 ranks need more than the 4 slots of a 2, b 2"):
        with_hosts(many, OWN, {})
    assert with_hosts(many, OF_MPICH, {}) == many
    assert with_hosts(many, OWN, {"OMPI_MCA_rmaps_base_oversubscribe": "1"}) == many
    with pytest.raises(UsageError, match="-np 5 is more than --per-node 2 allows: 4"):
        with_hosts(LaunchRequest(("P",), ranks=5, hosts=TWO, per_node=2), OWN, {})
    (tmp_path / "few").write_text("a slots=2\nb slots=1\n")
    few = LaunchRequest(("P",), hostfile=str(tmp_path / "few"), per_node=2)
    with pytest.raises(UsageError, match="few: 'b': --per-node 2 needs slots=2 there"):
        with_hosts(few, OWN, {})
    more = LaunchRequest(("P",), ranks=5, per_node=2)
    with pytest.raises(UsageError, match="allows: 2"):
        with_hosts(more, OWN, {})
    assert with_hosts(more, OWN, {"SLURM_JOB_ID": "1"}) == more
    assert with_hosts(more, SRUN, {}) == more
    (tmp_path / "hosts").write_text("a:2\nb:2\n")
    file = LaunchRequest(("P",), ranks=4, hostfile=str(tmp_path / "hosts"))
    assert with_hosts(file, SRUN, {}).hosts == TWO


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
    assert (found.name, found.path) == ("srun", str(tmp_path / "srun"))
    with pytest.raises(UsageError, match="no mpiexec on PATH that belongs to pals"):
        choose_launcher("pals", nowhere, {})
    for vendor, version, kind in (
        ("openmpi", "4.1.4", "openmpi 4"),
        ("openmpi", "5.0.11", "openmpi"),
        ("mpich", "4.0", "mpich"),
        ("intelmpi", "2021.9", "intelmpi"),
    ):
        own = own_launcher(MpiLibrary(vendor, version, None), "L")
        assert own == replace(LAUNCHERS[kind], path="L", vendor=vendor)


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


def test_limits_of_the_number_of_ranks(tmp_path: Path) -> None:
    assert limit_variables(None, None, None, 4, False) == {}
    assert limit_variables(2, 4, str(tmp_path / "hosts"), None, True) == {
        "HVDTRAIN_MIN_RANKS": "2",
        "HVDTRAIN_MAX_RANKS": "4",
        "HVDTRAIN_HOST_DISCOVERY": str(tmp_path / "hosts"),
    }
    for asked, message in (
        ((2, None, None, 4, False), "--min-np 2 goes with --elastic"),
        ((5, None, None, 4, True), "--min-np 5 is more than -np 4"),
        ((None, 4, None, 4, False), "--max-np 4 goes with --elastic"),
        ((None, 3, None, 4, True), "--max-np 3 is less than -np 4"),
        ((None, None, "hosts.sh", 4, True), "hosts.sh: give --max-np M as well"),
    ):
        with pytest.raises(UsageError, match=message):
            limit_variables(*asked)


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
