"""The parts of `hvdtrain check` that are pure."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hvdtrain.check import machine
from hvdtrain.check.machine import Cores
from hvdtrain.check.mpi import judge
from hvdtrain.check.probe import Finished, ProbeError, Section, ask_python, finish, guarded
from hvdtrain.control_groups import cpu_limit, memory_limit, memory_room
from hvdtrain.launch.launchers.mpi_library import MpiLibrary

LIBRARY = MpiLibrary("openmpi", "5.0.11", None)
GOOD = {
    "engine": "mpi",
    "library": "Open MPI v5.0.11",
    "size": 2,
    "sums": [3.0],
    "nodes": 1,
    "hosts": 1,
    "cores": [2, 2],
}


@pytest.mark.parametrize(
    ("membership", "files", "limit"),
    [
        pytest.param("0::/\n", {"cpu.max": "150000 100000"}, 1.5, id="container"),
        pytest.param("0::/\n", {"cpu.max": "max 100000"}, None, id="no limit"),
        pytest.param("0::/\n", {}, None, id="no file"),
        pytest.param("", {}, None, id="no control groups"),
        pytest.param(
            "0::/a/b\n",
            {"a/cpu.max": "400000 100000", "a/b/cpu.max": "max 100000"},
            4.0,
            id="limit of a parent",
        ),
        pytest.param(
            "5:memory:/x\n4:cpu,cpuacct:/x\n",
            {"cpu/x/cpu.cfs_quota_us": "250000", "cpu/x/cpu.cfs_period_us": "100000"},
            2.5,
            id="version 1",
        ),
        pytest.param(
            "4:cpu:/\n",
            {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
            None,
            id="version 1 without a limit",
        ),
    ],
)
def test_cpu_limit(membership: str, files: dict[str, str], limit: float | None) -> None:
    paths = {Path("/sys/fs/cgroup") / name: text for name, text in files.items()}
    assert cpu_limit(membership, paths.get) == limit


@pytest.mark.parametrize(
    ("membership", "files", "limit", "room"),
    [
        pytest.param("0::/\n", {}, None, None, id="no file"),
        pytest.param(
            "0::/\n", {"memory.max": "max", "memory.current": "5"}, None, None, id="no limit"
        ),
        pytest.param(
            "0::/\n",
            {
                "memory.max": "1000",
                "memory.current": "700",
                "memory.stat": "anon 400\ninactive_file 250",
            },
            1000,
            550,
            id="container",
        ),
        pytest.param(
            "0::/a/b\n",
            {
                "a/memory.max": "900",
                "a/memory.current": "850",
                "a/b/memory.max": "800",
                "a/b/memory.current": "100",
            },
            800,
            50,
            id="the parent is fuller",
        ),
        pytest.param(
            "5:memory:/host/path\n0::/\n",
            {
                "memory/memory.limit_in_bytes": "1000",
                "memory/memory.usage_in_bytes": "1200",
                "memory/memory.stat": "inactive_file 7\ntotal_inactive_file 100",
            },
            1000,
            0,
            id="version 1, full, with the path of the host",
        ),
        pytest.param(
            "5:memory:/\n",
            {
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "memory/memory.usage_in_bytes": "5",
            },
            None,
            None,
            id="version 1 without a limit",
        ),
    ],
)
def test_memory_limit(
    membership: str, files: dict[str, str], limit: int | None, room: int | None
) -> None:
    paths = {Path("/sys/fs/cgroup") / name: text for name, text in files.items()}
    assert memory_limit(membership, paths.get) == limit
    assert memory_room(membership, paths.get) == room


def test_usable_cores() -> None:
    assert Cores(machine=64, affinity=8, limit=None).usable == 8
    assert Cores(machine=64, affinity=8, limit=2.5).usable == 2.5
    assert Cores(machine=4, affinity=4, limit=16.0).usable == 4


@pytest.mark.parametrize(
    ("change", "returncode", "problem"),
    [
        pytest.param({}, 0, "", id="all is well"),
        pytest.param({"nodes": 2, "hosts": 2}, 0, "", id="two hosts of an allocation"),
        pytest.param({"size": 1, "sums": [1.0]}, 0, "formed worlds of 1", id="two worlds"),
        pytest.param({"sums": [1.0]}, 0, "an all-reduce gave [1.0] instead of 3.0", id="no sum"),
        pytest.param({"nodes": 2}, 0, "cannot read each other's memory", id="walls on one host"),
        pytest.param({}, 1, "(exit code 1): no route to host. See", id="a bad end"),
        pytest.param({}, -9, "(it died of SIGKILL)", id="killed"),
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


def test_judge_of_silence() -> None:
    assert "two ranks did not run" in judge(Finished(0, "", ""), Path("/m"), LIBRARY)


def test_a_probe_answers_with_its_last_json_line() -> None:
    assert ask_python("-c", "print('{'); print('{\"a\": 1}'); print('bye')") == {"a": 1}


@pytest.mark.parametrize(
    ("code", "seconds", "reason"),
    [
        ("raise OSError('no\\nsuch library')", 300, "exit code 1: OSError: no such library"),
        (
            "import sys; sys.exit('hvdtrain: engine mpi needs mpi4py')",
            300,
            "exit code 1: engine mpi",
        ),
        ("import os; os.abort()", 300, "it died of SIGABRT"),
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


def test_a_command_that_ignores_sigterm_is_ended() -> None:
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1); time.sleep(600)"
    with pytest.raises(ProbeError, match="no answer"):
        finish([sys.executable, "-c", code], 1)


def test_a_check_that_breaks_is_a_problem_of_its_own() -> None:
    def broken() -> Section:
        raise KeyError("x")

    section = guarded("cores", broken)
    assert section.problems == (
        "cores: looking at it failed (KeyError: 'x'): report this as a bug of hvdtrain",
    )


def test_memory_that_the_system_does_not_tell_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_memory() -> None:
        Path("/no/meminfo").read_text()

    monkeypatch.setattr(machine, "find_memory", find_memory)
    section = machine.check_memory()
    assert section.lines[0].startswith("unknown: ")
    assert section.facts["free_bytes"] is section.facts["machine_bytes"] is None
    assert section.problems == ()
