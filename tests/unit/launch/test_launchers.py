"""The command line for each launcher, with all that a person can ask for."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.launch.hosts.host import Host
from hvdtrain.launch.launchers.choice import (
    intel_mpi,
    jsrun,
    mpich,
    open_mpi_4,
    open_mpi_5,
    pals,
    srun,
)
from hvdtrain.launch.launchers.request import Builder, LaunchCommand, LaunchRequest, Site

BUILDERS: Mapping[str, Builder] = {
    "open mpi 4": open_mpi_4,
    "open mpi 5": open_mpi_5,
    "mpich": mpich,
    "intel mpi": intel_mpi,
    "srun": srun,
    "jsrun": jsrun,
    "pals": pals,
}
VENDORS = {"mpich": "mpich", "intel mpi": "intelmpi", "pals": "mpich"}
TWO = (Host("a", 2), Host("b", 2))
UNEQUAL = (Host("a", 2), Host("b", 1))
SH = """sh -c 'mkdir -p "$0" && exec "$@" > "$0/rank.${}.log" 2>&1' /logs PROGRAM"""
NAMES = "NCCL_SOCKET_IFNAME=ib0 {0}GLOO_SOCKET_IFNAME=ib0"
QUICK = {"OMPI_MCA_btl": "^ofi", "OMPI_MCA_mtl": "^ofi"}


def build(name: str, environ: Mapping[str, str] | None = None, **wanted: Any) -> LaunchCommand:
    """Build a command line for a program called PROGRAM."""
    request = LaunchRequest(("PROGRAM",), **wanted)
    return BUILDERS[name](request, Site("L", VENDORS.get(name, "openmpi"), environ or {}))


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
    site = Site("srun", "mpich", {})
    assert "--mpi=pmi2" in srun(LaunchRequest(("PROGRAM",), ranks=2), site).argv


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
