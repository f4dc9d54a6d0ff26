"""`run --elastic` starts a job again that mpirun has given up, and takes no loss for success."""

import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hosts import AGENT, require_hosts, write_hostfile
from job import Job
from ranks import start
from run_files import summary_of
from segments import no_new_segments

FOLDER = Path(__file__).parent
WORKER = FOLDER / "restarted_worker.py"
SAMPLES, EPOCHS = 100, 12
OPTIONS = (
    f"--global-batch-size 12 --epochs {EPOCHS} --lr 0.01 --lr-scaling none --device cpu "
    "--checkpoint-every 1step"
)
# Of runs that nobody interrupts, with 1 to 4 ranks, which add in different orders.
LOSS = 0.63062


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
    ("end", "slots"),
    [
        *(("host with daemon", [1, 1, 2]), ("silent host with daemon", [1, 1, 2])),
        *(("ranks of a host", [2, 1, 1]), ("a rank soon after its start", [])),
        ("2:47:forward:cut", [1, 1, 2]),  # all of whose connections to other hosts are closed
    ],
)
def test_training_goes_on(end: str, slots: list[int], tmp_path: Path) -> None:
    """Each sample is used once, and the loss is that of a run that nothing befalls."""
    out, ledger = tmp_path / "out", tmp_path / "ledger"
    words = [sys.executable, "-m", "hvdtrain", "run", "--elastic", "-np", sum(slots) or 3]
    env = {"HVDTRAIN_LEDGER": ledger, "KILLS": end if ":" in end else ""}
    if slots:
        require_hosts()
        words += ["-hostfile", write_hostfile(tmp_path / "hosts", "openmpi", slots), "-x", "KILLS"]
        env["PRTE_MCA_plm_ssh_agent"] = AGENT
    train = ["train", FOLDER / "killed_recipe.py", "--out", out, *OPTIONS.split()]
    with no_new_segments(), start([*words, "--", *train], env=env) as job:
        pids = job.rank_pids(sum(slots) or 3)
        if slots and ":" not in end:
            job.wait_for(lambda: any(out.glob("*")), "wrote anything")
            time.sleep(0.5)
        if "daemon" in end:
            end_host(pids[1], answers="silent" not in end)
        elif ":" not in end:
            for rank in (0, 1) if slots else (1,):
                os.kill(pids[rank], signal.SIGKILL)
        job.ended(600, code=0)
    summary = summary_of(out)
    assert summary["final"]["loss"] == pytest.approx(LOSS, rel=1e-4)
    assert len(set(summary["weights_sha256"])) == 1, summary
    assert summary["samples"] == EPOCHS * SAMPLES, summary
    require_each_once(ledger)


def end_host(pid: int, answers: bool) -> None:
    """End all processes of a stand-in host."""
    environ = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    folder = next(word for word in environ if word.startswith("TMPDIR="))
    if not answers:  # see agent.sh
        Path(folder.removeprefix("TMPDIR=")).with_suffix(".down").touch()
    while True:  # up to the first process of the host
        text = Path(f"/proc/{pid}/status").read_text()
        fields = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
        if fields["NSpid"].split()[-1] == "1":
            os.kill(pid, signal.SIGKILL)
            return
        pid = int(fields["PPid"])


def require_each_once(ledger: Path) -> None:
    """Check that steps before that with which the next world goes on have used each sample once."""
    worlds: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for path in ledger.parent.glob(f"{ledger.name}.*"):
        for line in map(json.loads, path.read_text().splitlines()):
            worlds.setdefault((line["start"], -line["ranks"]), []).append(line)
    used: dict[int, Counter[int]] = {epoch: Counter() for epoch in range(EPOCHS)}
    end = float("inf")
    for _, lines in sorted(worlds.items(), reverse=True):
        places = [line["epoch"] * SAMPLES + line["done"] for line in lines]
        for line, place in zip(lines, places, strict=True):
            if place < end:
                used[line["epoch"]].update(line["samples"])
        end = min([end, *places])
    for epoch, samples in used.items():
        assert samples == Counter(range(SAMPLES)), (epoch, samples)
