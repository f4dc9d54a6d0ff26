"""Ranks that are stopped for a while, interrupted or slow: the job goes on, with right results.

Those that end are in test_rank_failures.py.
"""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from job import Job, is_stopped
from ranks import launch, torch_beside

WORKER = Path(__file__).with_name("disturbed_worker.py")
STOPPED_SECONDS = 0.3


def wait_for_rounds(job: Job, more: int) -> None:
    found = re.findall(r"^round (\d+)$", job.stdout, re.MULTILINE)
    job.wait_for_output(f"round {max(map(int, found), default=0) + more}\n")


def stop_for_a_while(job: Job, pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    job.wait_for(lambda: is_stopped(pid), "stood still")
    time.sleep(STOPPED_SECONDS)
    os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(
    ("mpi", "engine", "shared_memory"),
    [
        ("openmpi", "mpi", "1"),
        pytest.param("openmpi", "gloo", "1", marks=pytest.mark.soak),
        pytest.param("mpich", "mpi", "0", marks=pytest.mark.mpich),
    ],
)
def test_the_job_goes_on(mpi: str, engine: str, shared_memory: str, tmp_path: Path) -> None:
    env = {"HVDTRAIN_ENGINE": engine, "HVDTRAIN_SHARED_MEMORY": shared_memory}
    end = tmp_path / "end"
    with launch(WORKER, 3, args=[end], mpi=mpi, env={**env, **torch_beside(mpi)}) as job:
        pids = job.rank_pids(3)
        wait_for_rounds(job, 3)
        for rank in (0, 1, 2, 1):
            stop_for_a_while(job, pids[rank])
            wait_for_rounds(job, 2)
        end.touch()
        done = job.ended(code=0)
        results = job.results(3)
    computed = {number for number, _ in results}
    assert len(computed) == 1
    assert min(computed) >= 11
    # In the middle of operations: rank 1 sleeps, for which the others wait.
    assert all(rung >= 50 for _, rung in results)
    assert "Traceback" not in done.stderr
