"""The command line for each launcher, from what a person asks for."""

from __future__ import annotations

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
    max_ranks_variables,
    min_ranks_variable,
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
SH = """sh -c 'mkdir -p "$0" && exec "$@" > "$0/rank.${}.log" 2>&1' /logs PROGRAM"""
NAMES = "NCCL_SOCKET_IFNAME=ib0 {0}GLOO_SOCKET_IFNAME=ib0"
QUICK = {"OMPI_MCA_btl": "^ofi", "OMPI_MCA_mtl": "^ofi"}


def build(name: str, environ: Mapping[str, str] | None = None, **wanted: Any) -> LaunchCommand:
    """Build a command line for a program called PROGRAM."""
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


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("open mpi 4", "--bind-to none --oversubscribe -np 4"),
        ("open mpi 5", "--bind-to none --oversubscribe -np 4"),
        ("mpich", "-np 4"),
        ("intel mpi", "-genv I_MPI_PIN 0 -np 4"),
        ("srun", "--mpi=pmix --kill-on-bad-exit=1 --export=ALL --ntasks=4"),
        ("pals", "-n 4 --cpu-bind none"),
    ],
)
def test_ranks_here(name: str, expected: str) -> None:
    assert options(name, ranks=4) == expected
    assert build(name, ranks=4).variables == (QUICK if name.startswith("open") else {})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("open mpi 4", "--bind-to none -host a:2,b:2"),
        ("open mpi 5", "--bind-to none -host a:2,b:2"),
        ("mpich", "-hosts a:2,b:2"),
        ("intel mpi", "-hosts a,b -ppn 2 -genv I_MPI_PIN 0"),
        (
            "srun",
            "--mpi=pmix --kill-on-bad-exit=1 --export=ALL --nodelist=a,b --nodes=2 "
            "--ntasks-per-node=2",
        ),
        ("pals", "--hosts a,b -n 4 --ppn 2 --cpu-bind none"),
    ],
)
def test_hosts_without_a_file(name: str, expected: str) -> None:
    assert options(name, hosts=TWO) == expected
    assert build(name, hosts=TWO).variables == {}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("open mpi 4", "--bind-to none -hostfile f --map-by ppr:1:node -np 2"),
        ("open mpi 5", "--bind-to none -hostfile f --map-by ppr:1:node -np 2"),
        ("mpich", "-f f -ppn 1 -np 2"),
        ("intel mpi", "-f f -genv I_MPI_PIN 0 -ppn 1 -np 2"),
        (
            "srun",
            "--mpi=pmix --kill-on-bad-exit=1 --export=ALL --ntasks=2 --nodelist=a,b --nodes=2 "
            "--ntasks-per-node=1",
        ),
        ("pals", "--hosts a,b -n 2 --ppn 1 --cpu-bind none"),
    ],
)
def test_a_file_of_hosts_with_ranks_per_node(name: str, expected: str) -> None:
    assert options(name, ranks=2, hosts=UNEQUAL, hostfile="f", per_node=1) == expected


def test_ranks_per_node_count_the_ranks_where_a_launcher_does_not() -> None:
    assert options("mpich", hosts=UNEQUAL, hostfile="f", per_node=3) == "-f f -ppn 3 -np 6"
    assert options("mpich", per_node=3) == "-ppn 3 -np 3"
    assert options("open mpi 5", per_node=3).endswith("--map-by ppr:3:node")
    assert "-host a:3,b:3 --map-by ppr:3:node" in options("open mpi 4", hosts=TWO, per_node=3)
    with pytest.raises(UsageError, match="--per-node 3 on how many hosts"):
        options("mpich", {"SLURM_JOB_ID": "1"}, per_node=3)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("open mpi 4", "-x A -x B='b c'"),
        ("open mpi 5", "-x A -x B='b c'"),
        ("mpich", "-genv B 'b c'"),
        ("intel mpi", "-genv B 'b c'"),
        ("jsrun", "-E 'B=b c'"),
        ("pals", "--env 'B=b c'"),
    ],
)
def test_variables(name: str, expected: str) -> None:
    words = shlex.split(options(name, ranks=2, per_node=2, exports={"A": None, "B": "b c"}))
    assert shlex.join(shlex.split(expected)) in shlex.join(words)


def test_srun_has_variables_with_commas_from_its_own_environment() -> None:
    line = build("srun", ranks=2, exports={"A": None, "B": "b,c"}, interface="ib0")
    assert line.variables["B"] == "b,c"
    assert line.variables["OMPI_MCA_btl_tcp_if_include"] == "ib0"
    assert "A" not in line.variables
    assert "B" not in shlex.join(line.argv)


def test_one_option_for_a_variable_that_is_forwarded_and_named() -> None:
    environ = {"HVDTRAIN_ENGINE": "mpi", "SECRET": "1"}
    flags = options("open mpi 5", environ, hosts=TWO, exports={"HVDTRAIN_ENGINE": "gloo"})
    assert flags == "--bind-to none -host a:2,b:2 -x HVDTRAIN_ENGINE=gloo"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "open mpi 4",
            "--mca btl_tcp_if_include ib0 --mca oob_tcp_if_include ib0 -x " + NAMES.format("-x "),
        ),
        (
            "open mpi 5",
            "--mca btl_tcp_if_include ib0 --prtemca prte_if_include ib0 -x " + NAMES.format("-x "),
        ),
        (
            "mpich",
            "-iface ib0 -genv NCCL_SOCKET_IFNAME ib0 -genv GLOO_SOCKET_IFNAME ib0 "
            "-genv FI_TCP_IFACE ib0",
        ),
        ("pals", "--env " + NAMES.format("--env ") + " --env FI_TCP_IFACE=ib0"),
    ],
)
def test_the_network_interface(name: str, expected: str) -> None:
    assert expected in options(name, hosts=TWO, interface="ib0")


def test_open_mpi_on_one_host_may_be_told_the_loopback() -> None:
    flags = options("open mpi 5", ranks=2, interface="lo")
    assert "--mca btl_tcp_if_include lo" in flags
    assert "prte_if_include" not in flags


@pytest.mark.parametrize(
    ("name", "bind", "expected"),
    [
        ("open mpi 4", "socket", "--bind-to socket:overload-allowed"),
        ("open mpi 5", "socket", "--bind-to package:overload-allowed"),
        ("open mpi 5", "none", "--bind-to none"),
        ("mpich", "numa", "-bind-to numa"),
        ("intel mpi", "none", "-genv I_MPI_PIN 0"),
        ("intel mpi", "numa", "-genv I_MPI_PIN_DOMAIN numa"),
        ("srun", "numa", "--cpu-bind=ldoms"),
        ("jsrun", "core", "-b packed:1"),
        ("pals", "hwthread", "--cpu-bind thread"),
    ],
)
def test_binding(name: str, bind: str, expected: str) -> None:
    assert f"{expected} " in options(name, ranks=2, per_node=2, bind=bind) + " "


def test_intel_mpi_binds_as_the_user_has_said() -> None:
    assert options("intel mpi", {"I_MPI_PIN_DOMAIN": "numa"}, ranks=2) == "-np 2"


def test_open_mpi_on_other_hosts_does_not_put_two_ranks_on_a_core() -> None:
    assert "--bind-to core -host" in options("open mpi 5", hosts=TWO, bind="core")


@pytest.mark.parametrize(
    ("name", "prefix", "both"),
    [
        ("open mpi 4", "--tag-output", "--tag-output --timestamp-output"),
        ("open mpi 5", "--output tag", "--output tag,timestamp"),
        ("mpich", "-l", "-prepend-pattern '%t [%r] '"),
        ("intel mpi", "-l", None),
        ("srun", "--label", None),
        ("jsrun", "--stdio_mode prepended", None),
        ("pals", "--label", None),
    ],
)
def test_prefixes(name: str, prefix: str, both: str | None) -> None:
    plain = options(name, ranks=2, per_node=2).split()
    words = options(name, ranks=2, per_node=2, prefix=True).split()
    assert " ".join(word for word in words if word not in plain) == prefix
    if both is None:
        with pytest.raises(UsageError, match="leave out --timestamps"):
            options(name, ranks=2, per_node=2, timestamps=True)
    else:
        assert both in options(name, ranks=2, per_node=2, prefix=True, timestamps=True)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("open mpi 4", SH.format("OMPI_COMM_WORLD_RANK")),
        ("open mpi 5", SH.format("OMPI_COMM_WORLD_RANK")),
        (
            "mpich",
            "-outfile-pattern /logs/rank.%r.log -errfile-pattern /logs/rank.%r.log -np 2 PROGRAM",
        ),
        ("srun", "--output=/logs/rank.%t.log PROGRAM"),
        ("jsrun", SH.format("JSM_NAMESPACE_RANK")),
        ("pals", SH.format("PALS_RANKID")),
    ],
)
def test_a_log_for_each_rank(name: str, expected: str) -> None:
    line = build(name, ranks=2, per_node=2, log_folder="/logs")
    assert shlex.join(line.argv).endswith(f" {expected}")
    assert line.folder == "/logs"
    assert line.shell().startswith("mkdir -p /logs && ")


def test_jsrun_makes_a_resource_set_of_each_host() -> None:
    assert options("jsrun", ranks=12, per_node=6) == (
        "-n 2 -r 1 -a 6 -c ALL_CPUS -g ALL_GPUS -d packed -b none"
    )


def test_srun_hands_on_what_sbatch_was_told() -> None:
    assert "--cpus-per-task=8" in options("srun", {"SLURM_CPUS_PER_TASK": "8"}, ranks=2)
    of_mpich = replace(SRUN, vendor="mpich")
    assert "--mpi=pmi2" in of_mpich.command(LaunchRequest(("PROGRAM",), ranks=2), {}).argv


@pytest.mark.parametrize(
    ("name", "wanted", "message"),
    [
        ("intel mpi", {"hosts": UNEQUAL}, "Intel MPI takes the same number of ranks on every host"),
        ("srun", {"hosts": UNEQUAL}, "srun takes the same number of ranks on every host, not 3"),
        ("pals", {"hosts": (Host("a"),)}, "PALS does not know how many ranks each host gets"),
        ("jsrun", {"hosts": TWO, "ranks": 4}, "jsrun gets its hosts from LSF"),
        ("jsrun", {"ranks": 4}, "jsrun needs -np N and --per-node K"),
        ("jsrun", {"ranks": 4, "per_node": 3}, "with N a multiple of K"),
        ("jsrun", {"ranks": 4, "per_node": 2, "bind": "numa"}, "jsrun cannot bind to numa"),
        ("intel mpi", {"ranks": 2, "bind": "hwthread"}, "use --bind core"),
        ("mpich", {"ranks": 2, "interface": "a,b"}, "accepts only one"),
    ],
)
def test_what_a_launcher_cannot_do(name: str, wanted: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        build(name, **wanted)
    assert "\n" not in str(caught.value)


PROGRAM = ("python", "-m", "hvdtrain")
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def mpirun(hostfile: str | None = None, environ: dict[str, str] | None = None) -> LaunchCommand:
    """Build a command line with these and otherwise plain arguments."""
    launcher = own_launcher(MpiLibrary("openmpi", "5.0.11", None), "/bin/mpirun")
    return launcher.command(LaunchRequest(PROGRAM, ranks=4, hostfile=hostfile), environ or {})


def test_open_mpi_with_a_hostfile_keeps_slots_and_network() -> None:
    line = mpirun(hostfile="hosts")
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


def test_the_line_can_be_pasted() -> None:
    line = LaunchCommand(("mpirun", "python", "a b.py", "$HOME"), {"A": "^x", "B": "1 2"})
    assert shlex.split(line.shell()) == ["env", "A=^x", "B=1 2", *line.argv]
    assert LaunchCommand(("mpirun", "python")).shell() == "mpirun python"


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
        named = replace(two, hosts=TWO[:1], ranks=2)
        assert with_hosts(named, OWN, environ).hosts == TWO[:1]
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
