"""The parts of `hvdtrain check` that are pure."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdtrain.check import checks
from hvdtrain.check.checks import Section, guarded, interfaces, judge, nccl_network, site_advice
from hvdtrain.check.probe import Finished, ProbeError, ask_python, finish
from hvdtrain.control_groups import cpu_limit, memory_limit
from hvdtrain.launch.launchers.mpi_library import MpiLibrary

LIBRARY = MpiLibrary("openmpi", "5.0.11", None)
GOOD = {
    "engine": "mpi", "library": "Open MPI v5.0.11", "size": 2, "sums": [3.0], "nodes": 1,
    "hosts": 1, "cores": [2, 2],
}  # fmt: skip


def control_groups(text: str) -> Callable[[Path], str | None]:
    """Return what reads files, of which each has a line: its path and its content."""
    pairs = (line.split(maxsplit=1) for line in text.splitlines())
    return {Path("/sys/fs/cgroup", name): content.replace(";", "\n") for name, content in pairs}.get


V1, INF = "4:cpu,cpuacct:/x\n5:memory:/x\n", "9223372036854771712"
STATED = "memory.max 1000\nmemory.current 700\nmemory.stat anon 400;inactive_file 250"
NESTED = "a/memory.max 900\na/memory.current 850\na/b/memory.max 800\na/b/memory.current 100"
OF_V1 = "memory/memory.limit_in_bytes {}\nmemory/memory.usage_in_bytes {}"
STAT_OF_V1 = "memory/memory.stat inactive_file 7;total_inactive_file 100"


@pytest.mark.parametrize(
    ("membership", "files", "limit"),
    [
        *(("0::/\n", "cpu.max 150000 100000", 1.5), ("0::/\n", "cpu.max max 100000", None)),
        *(("", "", None), ("0::/a/b\n", "a/cpu.max 400000 100000\na/b/cpu.max max 100000", 4.0)),
        (V1, "cpu/x/cpu.cfs_quota_us 250000\ncpu/x/cpu.cfs_period_us 100000", 2.5),
        (V1, "cpu/x/cpu.cfs_quota_us -1\ncpu/x/cpu.cfs_period_us 100000", None),
    ],
)
def test_cpu_limit(membership: str, files: str, limit: float | None) -> None:
    assert cpu_limit(membership, control_groups(files)) == limit


@pytest.mark.parametrize(
    ("membership", "files", "found"),
    [
        ("0::/\n", "memory.max max\nmemory.current 5", None),
        ("0::/\n", STATED, (1000, 550)),
        ("0::/a/b\n", NESTED, (800, 50)),  # the parent is fuller
        ("5:memory:/host/path\n0::/\n", f"{OF_V1.format(1000, 1200)}\n{STAT_OF_V1}", (1000, 0)),
        ("5:memory:/\n", OF_V1.format(INF, 5), None),
    ],
)
def test_memory_limit(membership: str, files: str, found: tuple[int, int] | None) -> None:
    assert memory_limit(membership, control_groups(files)) == found


@pytest.mark.parametrize(
    ("change", "returncode", "problem"),
    [
        *(({}, 0, ""), ({"nodes": 2, "hosts": 2}, 0, "")),
        ({"size": 1, "sums": [1.0]}, 0, "formed worlds of 1"),
        ({"sums": [1.0]}, 0, "an all-reduce gave [1.0] instead of 3.0"),
        *(({}, 1, "(exit code 1): no route to host. See"), ({}, -9, "(it died of SIGKILL)")),
    ],
)
def test_judge(change: dict[str, object], returncode: int, problem: str) -> None:
    said = f"hello\n{json.dumps(GOOD | change)}\n"
    found = judge(Finished(returncode, said, "----\n\n no route to host \n"), Path("/m"), LIBRARY)
    assert problem in found
    assert bool(found) == bool(problem)


def test_the_complaint_of_a_job_is_the_end_of_a_traceback() -> None:
    said = (
        "Traceback (most recent call last):\n"
        '  File "<string>", line 1, in <module>\n'
        "RuntimeError: cannot load MPI library\nlibmpi.so: no such file\n"
        "-------------\nprterun detected that one or more processes failed\n"
    )
    expected = "RuntimeError: cannot load MPI library libmpi.so: no such file"
    assert Finished(1, "", said).complaint == expected
    assert Finished(1, "", said + "hvdtrain: no\n").complaint == "no"


@pytest.mark.parametrize(
    ("code", "seconds", "reason"),
    [
        ("raise OSError('no\\nsuch library')", 300, "exit code 1: OSError: no such library"),
        ("pass", 300, "exit code 0: it said nothing"),
        ("import time; time.sleep(600)", 1, "no answer within 1 s"),
    ],
)
def test_a_probe_that_fails_says_why(code: str, seconds: float, reason: str) -> None:
    with pytest.raises(ProbeError) as caught:
        ask_python("-c", code, timeout_seconds=seconds)
    assert str(caught.value).startswith(reason)


def test_a_command_that_is_not_there() -> None:
    with pytest.raises(ProbeError, match="/no/such/mpirun: No such file"):
        finish(["/no/such/mpirun"], 5)


def test_a_check_that_breaks_is_a_problem_of_its_own() -> None:
    def broken() -> Section:
        raise KeyError("x")

    assert guarded("cores", broken).problems == [
        "cores: looking at it failed (KeyError: 'x'): report this as a bug of hvdtrain"
    ]


def test_memory_that_the_system_does_not_tell_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_memory() -> None:
        Path("/no/meminfo").read_text()

    monkeypatch.setattr(checks, "find_memory", find_memory)
    monkeypatch.setattr(checks, "_objection", lambda *_: "")  # which asks processes with torch
    section = checks.check_memory()
    assert section.lines[0].startswith("unknown: ")
    assert section.facts["free_bytes"] is section.facts["machine_bytes"] is None
    assert section.problems == ()


LIMITS = {"files": 4096, "locked": -1}
BY_SRUN = {"PMIX_NAMESPACE": "slurm.pmix.4.0", "SLURM_STEP_NUM_NODES": "2"}


@pytest.mark.parametrize(
    ("environ", "files", "limits", "advice"),
    [
        (
            {},
            {"net/lo": "unknown", "net/eth0": "up", "net/docker0": "up", "net/eth1": "down"},
            {},
            "",
        ),
        ({"MPICH_GPU_SUPPORT_ENABLED": "1"}, {}, {}, "set it to 0, or HVDTRAIN_ENGINE=mpi"),
        ({"MPICH_GPU_SUPPORT_ENABLED": "1", "HVDTRAIN_ENGINE": "mpi"}, {}, {}, ""),
        (BY_SRUN, {}, {}, "wait: export SLURM_PMIX_FENCE=ring, unless mpi.conf has it"),
        (BY_SRUN | {"SLURM_STEP_NUM_NODES": "1"}, {}, {}, ""),
        (BY_SRUN | {"SLURM_PMIX_FENCE": "ring"}, {}, {}, ""),
        (
            BY_SRUN | {"SLURM_PMIX_FENCE": "ring", "SLURM_PMIX_DIRECT_CONN": "No"},
            {},
            {},
            "export SLURM_PMIX_FENCE=ring and SLURM_PMIX_DIRECT_CONN=true",
        ),
        ({}, {"cxi/cxi0": ""}, {}, "Slingshot, but no libnccl-net.so in LD_LIBRARY_PATH"),
        ({"LD_LIBRARY_PATH": "/none:{}"}, {"cxi/cxi0": "", "libnccl-net.so": ""}, {}, ""),
        ({}, {"net/hsn0": "up", "net/eth0": "up"}, {}, "interfaces eth0, hsn0: libraries may"),
        ({"NCCL_SOCKET_IFNAME": "hsn0"}, {"net/hsn0": "up", "net/eth0": "up"}, {}, ""),
        ({}, {"infiniband/mlx5_0": ""}, {"locked": 65536}, "ulimit -l is 64 KiB"),
        ({"OMP_NUM_THREADS": "2", "SLURM_NTASKS_PER_NODE": "4"}, {}, {}, ""),
    ],
)
def test_site(
    environ: dict[str, str],
    files: dict[str, str],
    limits: dict[str, int],
    advice: str,
    tmp_path: Path,
) -> None:
    for name, state in files.items():
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "operstate").write_text(state)
    given = {name: value.format(tmp_path) for name, value in environ.items()}
    ranks = given.pop("SLURM_NTASKS_PER_NODE", "")
    found = list(site_advice(given, tmp_path, 8, LIMITS | limits, ranks))
    assert len(found) == bool(advice)
    assert advice in "".join(found)


@pytest.mark.parametrize(
    ("said", "fast", "text"),
    [
        ("x NCCL INFO Using network Socket\n", True, "Socket, but there is a fast network: load"),
        ("x NCCL INFO Using network Socket\n", False, "Socket"),
        ("x NCCL INFO Using network AWS Libfabric\n", True, "AWS Libfabric"),
        ("", True, "unknown"),
    ],
)
def test_the_network_of_nccl(said: str, fast: bool, text: str) -> None:
    found = nccl_network(said, fast)
    assert found.startswith(f"NCCL's network: {text}")
    assert fast or found.endswith(text)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("", ["eth1", "eth10"]),
        ("eth1", ["eth1", "eth10"]),
        ("=eth1", ["eth1"]),
        ("^lo,eth10", ["eth1"]),
        ("^=eth1", ["eth10"]),
        ("lo,docker", ["docker0", "lo"]),
    ],
)
def test_interfaces_that_nccl_would_use(asked: str, found: list[str], tmp_path: Path) -> None:
    for name in ("lo", "docker0", "eth1", "eth10"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "operstate").write_text("up\n")
    assert sorted(interfaces({"NCCL_SOCKET_IFNAME": asked}, tmp_path)) == found
