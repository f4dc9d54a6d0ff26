"""A job that ends badly leaves its timeline, up to the last second."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from ranks import launch, start
from trace_file import Trace

WORKER = Path(__file__).parent / "timeline_worker.py"
STEPS = 40


def merged(folder: Path) -> Trace:
    argv = [sys.executable, "-m", "hvdtrain", "timeline", "it.json"]
    assert start(argv, cwd=folder).end(code=0).stdout == "it.json: 2 pieces\n"
    return Trace(folder / "it.json", 2)


def events(piece: Path) -> list[dict[str, Any]]:
    """Return what is in a piece; it is whole whenever it is looked at, once it is begun."""
    text = piece.read_text() if piece.exists() else ""
    return json.loads(text)["traceEvents"] if text else []


def subjects(piece: Path) -> set[str]:
    return {event["name"] for event in events(piece)}


def shows_blocked(piece: Path) -> bool:
    """Return whether a piece says that the program has been blocked in the operation 'stuck'."""
    starts = [e["ts"] for e in events(piece) if e["name"] == "negotiation allreduce 'stuck'"]
    ends = [e["ts"] + e["dur"] for e in events(piece) if e["name"] == "blocked"]
    return bool(starts) and max(ends) > starts[0]


def check_what_is_stuck(trace: Trace) -> None:
    (stuck,) = (s for s in trace.slices if s.subject == "allreduce 'stuck'" and s.phase != "queue")
    assert (stuck.rank, stuck.phase) == (0, "negotiation")
    assert stuck.args["error"] == "was under way when this was written"
    (before,) = trace.of(f"allreduce 'step {STEPS - 1}'", "moving")[0]
    last = [s for s in trace.slices if s.rank == 0 and s.row == "training thread"][-1]
    assert last.phase == "blocked"
    assert before.end <= last.start < stuck.end
    assert stuck.start < last.end


def test_a_job_that_is_killed(tmp_path: Path) -> None:
    with launch(WORKER, 2, args=["is_killed"], cwd=tmp_path) as job:
        pids = job.rank_pids(2)
        first, second = (tmp_path / f"it.rank-{rank}.json" for rank in range(2))
        job.wait_for(lambda: shows_blocked(first), "showed what is stuck")
        last = f"moving allreduce 'step {STEPS - 1}'"
        job.wait_for(lambda: last in subjects(second), "showed the last step")
        for pid in (job.process.pid, *pids.values()):
            os.kill(pid, signal.SIGKILL)
        job.ended()
    assert subjects(tmp_path / "it.json") == subjects(first)
    trace = merged(tmp_path)
    for step in range(STEPS):
        for rank in range(2):
            assert trace.phases(rank, f"allreduce 'step {step}'") == ["negotiation", "moving"]
    check_what_is_stuck(trace)


def test_a_job_that_the_stall_watch_ends(tmp_path: Path) -> None:
    env = {"HVDTRAIN_STALL_SHUTDOWN_SECONDS": 0.5}
    with launch(WORKER, 2, args=["stalls"], cwd=tmp_path, env=env) as job:
        done = job.ended(code=1)
    assert "the job ends" in done.stderr
    assert all(
        f"moving allreduce 'step {step}'" in subjects(tmp_path / "it.rank-0.json")
        for step in range(STEPS)
    )
    check_what_is_stuck(merged(tmp_path))
