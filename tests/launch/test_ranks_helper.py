"""The helper that starts ranks: it must notice every way in which a job can go wrong."""

from pathlib import Path
from typing import Any

import pytest
from job import Completed, Job
from ranks import run_ranks

WORKER = Path(__file__).with_name("ranks_worker.py")
WAIT = Job.wait


@pytest.mark.parametrize(
    ("mpi", "behaviour", "reason"),
    [
        ("warm", "is killed", "exit code 137"),
        ("warm", "sleeps", "still running after 1 s"),
        ("warm", "leaves a child", "outlived the job"),
        ("openmpi", "is killed", "exit code 137"),
        ("openmpi", "reports nothing", "rank 1 of 2 left no result"),
    ],
)
def test_misbehaviour_fails(
    mpi: str, behaviour: str, reason: str, monkeypatch: pytest.MonkeyPatch
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


def wait_once_all_are_here(job: Job, timeout_seconds: float) -> Completed:
    """Wait as a job does, from when its last rank has said that it is here."""
    job.wait_for_output("rank 1 of 2 is here")
    return WAIT(job, timeout_seconds)
