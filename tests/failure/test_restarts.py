"""`run --elastic` starts a job again that mpirun has given up, and takes no loss for success."""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hosts import AGENT, require_hosts, write_hostfile
from job import Job
from kill_sweep import LOSS, end_host, sweep_case
from ranks import start

WORKER = Path(__file__).with_name("restarted_worker.py")


def launch_on_hosts(folder: Path, slots: Sequence[int], how: str, *more: object) -> Job:
    require_hosts()
    hostfile = write_hostfile(folder / "hosts", "openmpi", slots)
    run = [sys.executable, "-m", "hvdtrain", "run", "--elastic", "-hostfile", hostfile]
    env = {"PRTE_MCA_plm_ssh_agent": AGENT}
    return start([*run, "-np", sum(slots), *more, "--", WORKER, how], env=env)


def test_a_host_is_lost_at_the_start(tmp_path: Path) -> None:
    """Its daemon, too: mpirun then returns 0, and the job starts again on the other host."""
    with launch_on_hosts(tmp_path, [1, 1], "waits") as job:
        end_host(job.rank_pids(2)[1], answers=False)
        done = job.ended(code=0)
        assert job.results(1) == [{"ranks": [0], "hosts": ["node0"]}]
    text = "node1 no longer answers: starting again with 1 rank\n"
    assert done.stderr.count(text) == 1, done.stderr


@pytest.mark.soak
@pytest.mark.parametrize(
    ("how", "more", "code", "text"),
    [
        ("waits", ["--min-np", 2], 75, "1 rank could start again, fewer than --min-np 2"),
        ("waits after init", [], 1, "not started again, because no checkpoint holds its state"),
    ],
)
def test_a_host_is_lost_for_good(
    how: str, more: list[object], code: int, text: str, tmp_path: Path
) -> None:
    with launch_on_hosts(tmp_path, [1, 1], how, *more) as job:
        pids = job.rank_pids(2)
        if how == "waits after init":
            job.wait_for_output("waiting\nwaiting")
        end_host(pids[1], answers=False)
        done = job.ended(code=code)
    assert done.stderr.count(text) == 1, done.stderr


@pytest.mark.soak
@pytest.mark.parametrize("how", ["is killed", "waits"])
def test_a_rank_alone_on_its_host_is_killed_before_init(how: str, tmp_path: Path) -> None:
    """Only the process that supervises the job sees it, unless that is in the start of Python."""
    with launch_on_hosts(tmp_path, [1, 1], how) as job:
        if how == "waits":
            os.kill(job.rank_pids(2)[1], signal.SIGKILL)
        done = job.ended(code=0)
        assert [result["ranks"] for result in job.results(2)] == [[0, 1]] * 2
    text = "a rank has ended before all had started: the job ends"
    assert done.stderr.count(text) == 1 or how == "waits", done.stderr


@pytest.mark.soak
def test_a_rank_that_raises_ends_the_job() -> None:
    run = [sys.executable, "-m", "hvdtrain", "run", "--elastic", "-np", "2", "--", WORKER, "raises"]
    done = start(run).end(code=1)
    assert "ValueError: as it was told to" in done.stderr
    assert "again" not in done.stderr


@pytest.mark.soak
@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        ("host with daemon", 3),
        ("host with daemon", 5),
        ("ranks of a host", 2),
        ("first 0.5 s", 1),
        *(("bucket", 1), ("reduced", 2), ("updated", 3), ("two at once", 1), ("at any time", 1)),
        ("checkpoint", 1),
        ("during a recovery", 2),
        ("connections closed", 1),
    ],
)
def test_training_goes_on(kind: str, seed: int, tmp_path: Path) -> None:
    """Some runs of the sweep in kill_sweep.py: each sample once, and the loss of any run."""
    assert sweep_case(kind, seed, tmp_path).loss == pytest.approx(LOSS, rel=1e-4)
