"""Kills a process of each of many jobs, those of all libraries in turns, at random moments."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random

from hvdtrain.errors import HvdtrainError
from hvdtrain_bench.analysis.kills import (
    KILLS,
    NEW_STEP,
    NEXT_STEP,
    Failure,
    UnfinishedJobError,
    failure_of,
)
from hvdtrain_bench.elastic.contenders import CONTENDERS, ElasticContender
from hvdtrain_bench.elastic.sizes import RANKS, SAMPLES
from hvdtrain_bench.harness.jobs import Command, Process, running
from hvdtrain_bench.harness.notes import END, Note, read_notes
from hvdtrain_bench.harness.results import Case, Result
from hvdtrain_bench.harness.settings import MeasurementSettings
from hvdtrain_bench.harness.turns import in_turns

# By the events of worlds.py.
STAGES = {
    "noticed": "noticing",
    "agreed": "agreeing",
    "rebuilt": "rebuilding",
    "": "retaking",
}
# Steps of the victim before its end, and most seconds after the last of them.
_FIRST_STEP, _LAST_STEP, _MOST_SECONDS = 10, 70, 0.05
_LIMIT_SECONDS, _POLL_SECONDS = 240.0, 0.005
_LAST_LINES = 20


def kill_one(contender: ElasticContender, folder: Path, seed: int) -> Failure:
    """Run a job, kill one of its processes from outside, and return what that cost."""
    log = folder / "output.txt"
    variables = {**os.environ, "BENCH_NOTES": str(folder), "OMP_NUM_THREADS": "1"}
    command = Command(contender.command(folder), variables)
    try:
        with log.open("wb") as output, running([command], output) as (process,):
            killed = _kill(process, folder, Random(seed))
            process.wait(_LIMIT_SECONDS)
        notes, starts = read_notes(folder), contender.starts(folder)
        return failure_of(notes, killed, SAMPLES, STAGES, starts)
    except (UnfinishedJobError, subprocess.TimeoutExpired) as error:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
        told = "".join(f"\n  {line}" for line in lines)
        raise HvdtrainError(f"bench elastic: {contender.name}: {error}{told}") from None


def _kill(process: Process, folder: Path, random: Random) -> float:
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


_OWN = "hvdtrain"


def measure_kills(settings: MeasurementSettings, say: Callable[[str], None]) -> Result:
    """Run a job for each kill, and return what the kills cost with each library."""
    skipped: dict[str, str] = {}
    kills: dict[str, int] = {}
    for contender in CONTENDERS:
        problem = contender.problem()
        if problem:
            skipped[contender.name] = problem
        elif number := settings.kills if contender.name.startswith(_OWN) else settings.peer_kills:
            kills[contender.name] = number
    found: dict[str, list[Failure]] = {name: [] for name in kills}
    failed: dict[str, list[str]] = {name: [] for name in kills}
    chosen = [contender for contender in CONTENDERS if contender.name in kills]
    for number, contender in in_turns(chosen, max(kills.values(), default=0)):
        if number >= kills[contender.name]:
            continue
        title = f"  {KILLS}: {contender.name}, {number + 1} of {kills[contender.name]}"
        try:
            with tempfile.TemporaryDirectory() as folder:
                failure = kill_one(contender, Path(folder), number)
            found[contender.name].append(failure)
            say(f"{title}: {failure.seconds:.2f} s")
        except HvdtrainError as error:
            say(f"{title}: {error}")
            failed[contender.name].append(str(error))
    for name in [name for name, failures in found.items() if not failures]:
        skipped[name] = f"no job of {len(failed[name])} went on: {failed[name][0]}"
    cases = [_case(one, found[one.name], failed[one.name]) for one in chosen if found[one.name]]
    return Result(KILLS, RANKS, 1, [], skipped, cases)


def _case(contender: ElasticContender, failures: list[Failure], failed: list[str]) -> Case:
    values = {
        NEW_STEP: [one.seconds for one in failures],
        NEXT_STEP: [one.next_seconds for one in failures],
        **{stage: [one.stages[stage] for one in failures] for stage in failures[0].stages},
    }
    about = {
        "needs": contender.needs,
        "failures": [asdict(one) for one in failures],
        "failed": failed,
    }
    return Case(contender.name, about, "seconds", values)
