"""`python -m hvdtrain check --job` on hosts of this machine, where something is wrong for real."""

import json
import os
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hosts import AGENT_VARIABLES, require_hosts
from job import Completed, Job
from mpis import MPICH
from ranks import mpi_python, start

HERE = socket.gethostname()
HOSTS = ("-H", "node0,node1")
CLOCK = "import time; now = time.time; time.time = lambda: now() + 5000\n"
LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\n"
# Another processor, little memory, and a GPU far from the cores, seen by this host alone.
OTHER_MACHINE = """
import subprocess
for name in ("proc/cpuinfo", "proc/meminfo", "sys/bus/pci/drivers"):
    subprocess.run(["mount", "--bind", {folder!r} + "/" + name, "/" + name], check=True)
"""
OTHER_PACKAGE = "import sys; sys.path.insert(0, {folder!r} + '/other')"
STUCK = "import time; time.sleep(1000)"
BEFORE_MPI = "import sys, time\nif 'links' in sys.orig_argv: time.sleep(1000)"
IN_MESSAGES = """\
import sys, time
now = time.time
time.time = lambda: (sys._getframe(1).f_code.co_name == '_exchange' and time.sleep(1000)) or now()
"""
# Ports that refuse, as behind a firewall.
DEAF = """\
def bound(address):
    server = socket.socket()
    server.bind(address)
    return server
socket.create_server = bound
"""


def begin(*words: object, env: Mapping[str, object] | None = None, mpi: str = "openmpi") -> Job:
    require_hosts()
    limit = "--timeout", 200  # a busy machine may take longer than 30 s
    command = [mpi_python(mpi), "-m", "hvdtrain", "check", "--job", *limit, *words]
    return start(command, env={**AGENT_VARIABLES[mpi], **(env or {})})


def ended(job: Job) -> Completed:
    done = job.end()
    assert "Traceback" not in done.stdout + done.stderr
    return done


def check(*words: object, **how: Any) -> Completed:
    return ended(begin(*words, **how))


def begin_where_node1(folder: Path, code: str, *words: object) -> Job:
    """Begin a check of two nodes, of which node1 runs some code in each Python."""
    text = "\n".join(f"    {line}" for line in code.format(folder=str(folder)).splitlines())
    (folder / "sitecustomize.py").write_text(
        f"import socket\nif socket.gethostname() == 'node1':\n{text}\n"
    )
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return begin(*HOSTS, "--json", *words, env={"PYTHONPATH": path})


def report_of(job: Job) -> dict[str, Any]:
    done = ended(job)
    report: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (1 if report["problems"] else 0)
    return report


def check_where_node1(folder: Path, code: str, *words: object) -> dict[str, Any]:
    return report_of(begin_where_node1(folder, code, *words))


@pytest.mark.parametrize("mpi", ["openmpi", MPICH])
def test_two_nodes(mpi: str) -> None:
    done = check(*HOSTS, env={"NCCL_SOCKET_IFNAME": "lo"}, mpi=mpi)
    assert done.returncode == 0
    assert "nodes       node[0-1]; 2 of 2 ranks have started\n" in done.stdout
    assert "messages between nodes: " in done.stdout
    assert done.stdout.endswith("  no remarks\nall is well\n")


def test_what_nodes_say(tmp_path: Path) -> None:
    for bus, cores in (("41", "0-3"), ("01", "4000-4007")):
        gpu = tmp_path / f"sys/bus/pci/drivers/nvidia/0000:{bus}:00.0"
        gpu.mkdir(parents=True)
        (gpu / "local_cpulist").write_text(cores)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("model name : other")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 68719476736 kB\nMemAvailable: 1024 kB\n")
    other = tmp_path / "other" / "torch-0.1.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Name: torch\nVersion: 0.1\n")
    planted = CLOCK + LIMIT + OTHER_MACHINE + OTHER_PACKAGE
    report = check_where_node1(tmp_path, planted, "--per-node", 2)
    ranks = report["nodes"]["ranks"]
    assert [facts["host"] for facts in ranks.values()] == ["node0"] * 2 + ["node1"] * 2
    assert {facts["size"] for facts in ranks.values()} == {4}
    ahead = sorted((peer, round(seconds, -2)) for peer, _, seconds in ranks["0"]["messages"])
    assert ahead == [(1, 0), (2, 5000), (3, 5000)]
    (problem,) = report["problems"]
    assert problem.startswith("torch: 2.")
    assert problem.endswith(
        " on node0, 0.1 on node1: use one environment on all nodes, as with run --stage-env"
    )
    remarks = "\n".join(report["nodes"]["remarks"])
    assert "clocks: node1 +5000." in remarks
    assert "node1: ulimit -n is 256: ranks and data loaders need" in remarks
    assert " on node0, other on node1: the slowest decides" in remarks
    assert " on node0, 65536 GiB on node1: the slowest decides" in remarks
    assert "node1: local rank 0 is bound to none of the cores near its GPU, 4000-4007:" in remarks


def test_a_node_that_others_do_not_reach(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    (problem,) = check_where_node1(tmp_path, DEAF)["problems"]
    assert problem.startswith("node0: the next node is not reached on lo (Connection refused): ")


def test_a_node_that_does_not_answer(tmp_path: Path) -> None:
    """Three jobs wait at the same time, each for all of its time but a few seconds."""
    no_answer = "node1: no answer (no answer within 53 s): log in and try Python there"
    apart = "MPI does not connect node0 to node1, node1 to node0 (no answer with"
    with ExitStack() as jobs:
        begun = []
        for name, code in (("stuck", STUCK), ("before", BEFORE_MPI), ("apart", IN_MESSAGES)):
            (tmp_path / name).mkdir()
            job = begin_where_node1(tmp_path / name, code, "--timeout", 60)
            begun.append(jobs.enter_context(job))
        for job, said in zip(begun, (no_answer, no_answer, apart), strict=True):
            (problem,) = report_of(job)["problems"]
            assert problem.startswith(said)


def test_ranks_on_one_core_and_few_threads_of_mpi() -> None:
    """On this host alone, where nothing names others."""
    command = ["taskset", "-c", 0, mpi_python("openmpi"), "-m", "hvdtrain", "check", "--job"]
    command += ["--timeout", 200]
    env = {"MPI4PY_RC_THREAD_LEVEL": "funneled", "OMP_NUM_THREADS": 2}
    done = start([*command, "--per-node", 2], env=env).end(code=0)
    assert f"{HERE}: threads of MPI: funneled, but process sets need multiple: " in done.stdout
    assert f"ranks 0, 1 on {HERE}: 1 core for all of them: start fewer ranks " in done.stdout
    assert "bound to one core, but computing with 2 threads" in done.stdout
    assert "OMP_NUM_THREADS=2 on 2 ranks, but 1 cores: set it to 1" in done.stdout


ADVICE = "from hvdtrain.check.checks import node_advice; print(*node_advice(''), sep='\\n')"
FORBID = "import forbidding; forbidding.forbid(forbidding.PIDFD_OPEN); "
TMPFS = ["unshare", "--mount", "--map-root-user", "--user", "sh", "-c"]
FILL = 'head -c 16k /dev/zero > "$HOME/full"; '
MOUNT = 'mount -t tmpfs -o size={} none {} && {}exec "$0" "$@"'


@pytest.mark.parametrize(
    ("prefix", "code", "said"),
    [
        (
            ["sh", "-c", '(ulimit -f 0; exec "$0" "$@") | cat'],
            "",
            "be reserved or opened by others: File ",
        ),
        (
            [*TMPFS, MOUNT.format("1m", "/dev/shm", "")],
            "",
            "/dev/shm: 1 MiB free, which is little for",
        ),
        (
            [*TMPFS, MOUNT.format("16k", '"$HOME"', FILL)],
            "",
            "No space left on device: make room there",
        ),
        ([], FORBID, "(pidfd_open: Operation not permitted), so they use MPI"),
    ],
)
def test_what_containers_and_quotas_withhold(
    prefix: list[str], code: str, said: str, tmp_path: Path
) -> None:
    require_hosts()
    env = {"HOME": tmp_path}
    done = start([*prefix, mpi_python("openmpi"), "-c", code + ADVICE], env=env).end(code=0)
    assert said in done.stdout
    assert said not in start([mpi_python("openmpi"), "-c", ADVICE], env=env).end(code=0).stdout


def test_options_of_another_check() -> None:
    done = start([mpi_python("openmpi"), "-m", "hvdtrain", "check", "-H", "node0"]).end(code=2)
    assert done.stderr == (
        "hvdtrain: -H, -hostfile, --per-node and --timeout go with --job only: give it, too\n"
    )
