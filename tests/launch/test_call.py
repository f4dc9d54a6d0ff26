"""`hvdtrain.run(function, ...)`: each rank's result, or the first exception, also on two hosts."""

import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from called import BoomError, UnpicklableError, summed
from hosts import AGENT, require_hosts
from job import Job
from ranks import start

import hvdtrain
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.launch.calls.call import RankServer, places
from hvdtrain.launch.calls.called_rank import KEY, Arrival, RankAnswer, connected

RANKS = 3


def test_results_come_by_rank(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="hvd-") as folder:  # sockets have short names
        with monkeypatch.context() as patches:
            patches.setattr(tempfile, "tempdir", folder)
            found = hvdtrain.run(summed, args=(2.0,), kwargs={"name": "x"}, np=RANKS)
        assert list(Path(folder).iterdir()) == []
    total = 2.0 * sum(range(1, RANKS + 1))
    assert found == [(rank, [total] * 3, "x") for rank in range(RANKS)]
    said = capfd.readouterr()
    hello = [line for line in said.out.splitlines() if line.startswith("hello")]
    assert sorted(hello) == [f"hello from rank {rank}" for rank in range(RANKS)]
    assert said.err == ""


def test_a_function_of_the_moment_and_large_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")  # in a job with one task, a notebook's for example
    monkeypatch.setenv("SLURM_NTASKS", "1")
    size = 1 << 20

    def made() -> tuple[Any, int]:
        return np.full(size, int(os.environ.get("OMPI_COMM_WORLD_RANK", -1))), os.getpid()

    (first, one), (second, other) = hvdtrain.run(made, np=2)
    assert (first.sum(), second.sum()) == (0, size)
    assert len({one, other, os.getpid()}) == 3
    assert "HVDTRAIN_CALL_KEY" not in os.environ


def test_a_caller_that_is_the_only_rank_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert hvdtrain.run(os.getenv, args=("RANK",), np=2) == ["0", "1"]


def test_the_exception_of_the_rank_that_failed() -> None:
    def fails() -> None:
        import hvdtrain.torch as hvd

        hvd.init()
        if hvd.rank() == 1:
            raise BoomError(7, "told to")
        hvd.barrier()  # in which the others wait for it

    with pytest.raises(BoomError) as caught:
        hvdtrain.run(fails, np=RANKS)
    assert caught.value.args == (7, "told to")
    (note,) = caught.value.__notes__
    assert note.startswith(f"on rank 1 of {RANKS}:\nTraceback")
    assert "in fails" in note


@pytest.mark.parametrize(
    "error", [lambda: ValueError(threading.Lock()), lambda: UnpicklableError(text="told to")]
)
def test_an_exception_that_cannot_be_sent(error: Callable[[], Exception]) -> None:
    def fails() -> None:
        raise error()

    with pytest.raises(HvdtrainError, match=r"(?s)on rank 0 of 1:.*Error: (<unlocked|told to)"):
        hvdtrain.run(fails)


def test_the_end_of_a_rank_is_not_the_end_of_the_caller() -> None:
    with pytest.raises(HvdtrainError, match=r"(?s)on rank 0 of 1:.*SystemExit: 0"):
        hvdtrain.run(sys.exit, args=(0,))


def test_a_result_that_cannot_be_sent() -> None:
    with pytest.raises(TypeError, match="cannot pickle"):
        hvdtrain.run(threading.Lock)


def test_a_rank_that_ends_without_a_word() -> None:
    def leaves() -> None:
        if os.environ.get("OMPI_COMM_WORLD_RANK") == "1":
            os._exit(5)
        time.sleep(600)

    with pytest.raises(HvdtrainError, match=r"ranks 0, 1 of 2 ended without a result .*exit code"):
        hvdtrain.run(leaves, np=2)


def test_a_caller_that_is_killed_leaves_nothing() -> None:
    with tempfile.TemporaryDirectory(prefix="hvd-") as folder:  # sockets have short names
        with _called_to_sleep({"TMPDIR": folder}) as job:
            assert list(Path(folder).glob("hvdtrain-run-*/call"))
            os.kill(_launcher(job), signal.SIGSTOP)  # nor does it end the ranks
            job.process.kill()
            assert job.wait().returncode == -signal.SIGKILL
            job.assert_nothing_left()
        assert list(Path(folder).iterdir()) == []


def test_a_launcher_that_is_killed_leaves_no_ranks() -> None:
    with _called_to_sleep() as job:
        os.kill(_launcher(job), signal.SIGKILL)
        done = job.ended(code=1)
    assert "ranks 0, 1 of 2 ended without a result (mpirun's exit code is -9)" in done.stderr


def _called_to_sleep(env: Mapping[str, object] | None = None) -> Job:
    code = """if True:
        import called, hvdtrain
        from hvdtrain.launch import supervise
        supervise._LAUNCHER_SECONDS = 3.0
        hvdtrain.run(called.sleeps, np=2)
    """
    job = start([sys.executable, "-u", "-c", code], env=env)
    job.wait_for_output("sleeps\nsleeps\n")
    return job


def _launcher(job: Job) -> int:
    pid = job.process.pid
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def test_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="np=0 must be at least 1"):
        hvdtrain.run(print, np=0)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    with pytest.raises(UsageError, match="starts ranks itself: call it without"):
        hvdtrain.run(print, np=2)


def test_the_documented_call_beside_a_world_of_ones_own(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "cluster.md").read_text()
    ((code, printed),) = re.findall(
        r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL
    )
    script = tmp_path / "script.py"
    script.write_text(f"import hvdtrain.torch\nhvdtrain.torch.init()\n{code}")
    done = start([sys.executable, script]).end()
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")


NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")


@pytest.fixture
def two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    require_hosts()
    monkeypatch.setenv("PRTE_MCA_plm_ssh_agent", str(AGENT))


@pytest.mark.usefixtures("two_hosts")
def test_ranks_of_two_hosts_meet() -> None:
    def trains() -> tuple[str, list[str], float]:
        import torch
        import torch.distributed as dist

        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the names of stand-in hosts lead nowhere
        dist.init_process_group("gloo")
        total = torch.tensor(dist.get_rank() + 1.0)
        dist.all_reduce(total)
        dist.barrier()
        dist.destroy_process_group()
        return socket.gethostname(), [os.environ[name] for name in NAMES], float(total)

    assert hvdtrain.run(trains, hosts="nodea:2,nodeb:1") == [
        ("nodea", ["0", "3", "0", "2", "0"], 6.0),
        ("nodea", ["1", "3", "1", "2", "0"], 6.0),
        ("nodeb", ["2", "3", "0", "1", "1"], 6.0),
    ]


def test_the_address_of_the_first_rank() -> None:
    """It is one over which two hosts have connected, and the loopback where all are on one."""
    here = Arrival(0, "a", 70, reached="172.17.0.1", origin="172.17.0.1")
    there = Arrival(1, "b", 71, reached="10.0.0.1", origin="10.0.0.2")
    also = Arrival(2, "b", 72, reached="10.0.0.1", origin="10.0.0.2")

    def stores(arrived: list[Arrival], caller: str) -> set[tuple[str, ...]]:
        return {place.addresses for place in places(arrived, caller)}

    assert stores([here, there, also], "a") == {("10.0.0.1:70",)}
    assert stores([here, there, also], "c") == {("172.17.0.1:70",)}
    assert stores([there, also], "a") == {("127.0.0.1:71",)}
    assert stores([Arrival(0, "a", 70)], "a") == {("127.0.0.1:70",)}
    found = [(p.rank, p.local_rank, p.local_size, p.node) for p in places([here, there, also], "a")]
    assert found == [(0, 0, 1, 0), (1, 0, 2, 1), (2, 1, 2, 1)]


def test_bad_hosts(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="both name hosts"):
        hvdtrain.run(print, hosts="a:1", hostfile=tmp_path)
    with pytest.raises(UsageError, match="does not exist"):
        hvdtrain.run(print, hostfile=tmp_path / "none")
    with pytest.raises(UsageError, match="3 ranks need more than the 2 slots"):
        hvdtrain.run(print, np=3, hosts="a:1,b:1")
    (tmp_path / "hosts").write_text("a\n")
    with pytest.raises(UsageError, match="also pass np="):
        hvdtrain.run(print, hostfile=tmp_path / "hosts")


class Touching:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def test_strangers_that_connect_are_ignored(tmp_path: Path) -> None:
    """One says nothing, two speak other languages, and one has another key."""
    listening = socket.create_server(("127.0.0.1", 0))
    place = listening.getsockname()
    address = f"127.0.0.1:1,{place[0]}:{place[1]}"  # nobody is at the first of them
    with (
        RankServer(listening, address, b"call", 1, "run()") as server,
        socket.create_connection(place),
        socket.create_connection(place) as rude,
        Connection(socket.create_connection(place).detach()) as sly,
    ):
        rude.sendall(b"GET / HTTP/1.0\r\n\r\n")
        sly.send(Touching(tmp_path / "unpickled"))
        with pytest.raises(ConnectionError, match="cannot reach the process that called"):
            connected(f"{place[0]}:{place[1]}", b"x" * 32)
        with connected(address, bytes.fromhex(server.variables[KEY])) as rank:
            rank.send(Arrival(0, "node", 70))
            found, call = rank.recv()
            assert (found.rank, found.size, found.addresses) == (0, 1, ("127.0.0.1:70",))
            assert call == b"call"
            rank.send(RankAnswer(0, b"result"))
            while not server.answers:
                time.sleep(0.01)
    assert server.answers == [RankAnswer(0, b"result")]
    assert not list(tmp_path.iterdir())
