"""The helper that starts ranks: it must notice every way in which a job can go wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import warm
from job import Completed, Job, python_path
from ranks import launch, run_ranks, start

WORKER = Path(__file__).with_name("ranks_worker.py")
WAIT = Job.wait
# With "warm", ranks are forked.
HOWS = [("openmpi", ""), ("openmpi", "json"), pytest.param("mpich", "", marks=pytest.mark.mpich)]


@pytest.mark.parametrize(("mpi", "warm"), HOWS)
def test_results_come_back_by_rank(mpi: str, warm: str) -> None:
    np = 3
    done = run_ranks(WORKER, np, args=["behaves", 7], mpi=mpi, warm=warm)
    assert done.returncode == 0
    assert done.results == [
        {"rank": rank, "size": np, "cwd": [], "argv": ["behaves", "7"]} for rank in range(np)
    ]
    assert f"rank {np - 1} of {np} is here" in done.stdout
    assert done.seconds > 0


@pytest.mark.parametrize(
    ("mpi", "behaviour", "reason"),
    [
        ("openmpi", "exits 3", "exit code 3"),
        ("warm", "is killed", "exit code 137"),
        ("warm", "sleeps", "still running after 1 s"),
        ("warm", "leaves a child", "outlived the job"),
        ("openmpi", "is killed", "exit code 137"),
        pytest.param("mpich", "is killed", "exit code 9", marks=pytest.mark.mpich),
        ("openmpi", "reports nothing", "rank 1 of 2 left no result"),
        pytest.param(
            "mpich",
            "sleeps through SIGTERM",
            "still running after 1 s",
            marks=pytest.mark.mpich,
        ),
    ],
)
def test_misbehaviour_fails(
    mpi: str, behaviour: str, reason: str, started: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    timeout_seconds = 300
    if "still running" in reason:
        timeout_seconds = 1
        monkeypatch.setattr(Job, "wait", wait_once_all_are_here)
    if "outlived" in reason:
        monkeypatch.setattr(Job, "patience_seconds", 2.0)
    how: dict[str, Any] = {"warm": "json"} if mpi == "warm" else {"mpi": mpi}
    with pytest.raises(AssertionError, match=reason) as caught:
        run_ranks(WORKER, 2, args=[behaviour], timeout_seconds=timeout_seconds, **how)
    assert "rank 1 of 2 is here" in str(caught.value)
    assert started[0].pids() == []


def wait_once_all_are_here(job: Job, timeout_seconds: float) -> Completed:
    """Wait as a job does, from when its last rank has said that it is here."""
    job.wait_for_output("rank 1 of 2 is here")
    return WAIT(job, timeout_seconds)


def test_a_failing_job_can_be_watched() -> None:
    with launch(WORKER, 2, args=["all sleep"]) as job:
        pid = job.rank_pids(2)[1]
        job.wait_for_output("rank 1 of 2 is here")
        os.kill(pid, signal.SIGKILL)
        done = job.wait(300)
        assert done.returncode not in (0, None)
        job.assert_nothing_left()


def test_a_warm_process_outlives_its_ranks_but_they_do_not_outlive_it() -> None:
    """A rank and what stands for it end together; later the process is killed."""
    python = Path(sys.executable)
    address, server = warm._start.__wrapped__(python, "json")
    command = [*warm.warm_prefix(python, "json")[:-1], address, str(WORKER), "all sleep"]
    env = os.environ | {"PYTHONPATH": python_path()}
    for killed in (False, True):
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as stand_in:
            assert stand_in.stdout is not None
            assert stand_in.stdout.readline() == b"rank 0 of 1 is here\n"
            (rank,) = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
            if killed:
                server.kill()
            else:
                server.send_signal(signal.SIGSTOP)
                wait_for_state(server.pid, "T")
                os.kill(int(rank), signal.SIGKILL)
                wait_for_state(int(rank), "Z")
                stand_in.kill()
                server.send_signal(signal.SIGCONT)
            assert stand_in.stdout.read() == b""  # when the rank has closed it, too
    server.communicate()


def wait_for_state(pid: int, state: str) -> None:
    """Wait until Linux says this of a process."""
    deadline = time.monotonic() + 300
    while f") {state} " not in (stat := Path(f"/proc/{pid}/stat").read_text()):
        assert time.monotonic() < deadline, stat
        time.sleep(0.01)


def test_a_job_takes_variables_away_and_gives_them() -> None:
    done = start(["env"], env={"PATH": None, "GIVEN": 3}).wait(300)
    names = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert "PATH" not in names
    assert (names["GIVEN"], names["OMP_NUM_THREADS"]) == ("3", "1")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Collect the jobs that a test starts."""
    jobs: list[Job] = []
    original = Job.__init__

    def remember(self: Job, *args: object) -> None:
        jobs.append(self)
        original(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Job, "__init__", remember)
    return jobs
