"""Kills one process of a job at a random moment, and waits for the job's end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

from hvdtrain.errors import HvdtrainError
from hvdtrain_bench.analysis.failures import Failure, UnfinishedJobError, failure_of
from hvdtrain_bench.elastic.contenders import Contender
from hvdtrain_bench.elastic.sizes import RANKS, SAMPLES
from hvdtrain_bench.harness.notes import END, Note, read_notes

# By the events of stages.py.
STAGES = {
    "noticed": "noticing",
    "agreed": "agreeing",
    "rebuilt": "rebuilding",
    "": "retaking",
}
# Steps of the victim before its end, and most seconds after the last of them.
_FIRST_STEP, _LAST_STEP, _MOST_SECONDS = 10, 70, 0.05
_LIMIT_SECONDS, _GRACE_SECONDS, _POLL_SECONDS = 240.0, 10.0, 0.005
_LAST_LINES = 20


def kill_one(contender: Contender, folder: Path, seed: int) -> Failure:
    """Run a job, kill one of its processes from outside, and return what that cost."""
    log = folder / "output.txt"
    variables = {**os.environ, "BENCH_NOTES": str(folder), "OMP_NUM_THREADS": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            contender.command(folder),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=variables,
            start_new_session=True,
        )
    try:
        killed = _kill(process, folder, Random(seed))
        process.wait(_LIMIT_SECONDS)
        notes, starts = read_notes(folder), contender.starts(folder)
        return failure_of(notes, killed, SAMPLES, STAGES, starts)
    except (UnfinishedJobError, subprocess.TimeoutExpired) as error:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
        told = "".join(f"\n  {line}" for line in lines)
        raise HvdtrainError(f"bench elastic: {contender.name}: {error}{told}") from None
    finally:
        _end(process)


def _kill(process: subprocess.Popen[bytes], folder: Path, random: Random) -> float:
    """Kill one process after some steps of it, and return the time."""
    step, victim = random.randint(_FIRST_STEP, _LAST_STEP), random.randrange(RANKS)
    waited = time.monotonic()
    while True:
        ended = {pid: _steps_of(lines) for pid, lines in read_notes(folder).items()}
        if len(ended) == RANKS and min(ended.values()) >= step:
            break
        if process.poll() is not None:
            raise UnfinishedJobError(f"it ended with code {process.returncode} before the kill")
        if time.monotonic() - waited > _LIMIT_SECONDS:
            raise UnfinishedJobError("it did not begin to train")
        time.sleep(_POLL_SECONDS)
    time.sleep(random.random() * _MOST_SECONDS)
    killed = time.monotonic()
    os.kill(sorted(ended)[victim], signal.SIGKILL)
    return killed


def _steps_of(lines: Sequence[Note]) -> int:
    return sum(line["event"] == END for line in lines)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
