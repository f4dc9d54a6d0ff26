"""What killed ranks cost, from the jobs' notes, and what it costs to be ready for that."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from math import isclose
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from statistics import median

from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.launch.launchers.mpi_library import loaded_library
from hvdtrain.launch.launchers.options import require_tolerance
from hvdtrain_bench.analysis.judge import (
    ELASTIC,
    ELASTIC_STEPS,
    KILLS,
    NEW_STEP,
    NEXT_STEP,
    NOT_ELASTIC,
    NOT_ELASTIC_AGAIN,
    OWN,
)
from hvdtrain_bench.elastic.notes import BATCH, BEGIN, END, RANKS, SAMPLES, WORLD, Note, read_notes
from hvdtrain_bench.harness.jobs import Command, Process, RankLauncher, running, wait
from hvdtrain_bench.harness.results import Case, MeasurementSettings, PeerFacts, Result
from hvdtrain_bench.harness.turns import in_turns

_HERE = Path(__file__).parent
_MODULE = "hvdtrain_bench.elastic"
# Horovod puts the host of a killed process on a list and starts nothing there: each has its own.
_NAMES = ("localhost", "127.0.0.1")


@dataclass(frozen=True)
class ElasticContender:
    name: str
    needs: str  # what it needs beside the script
    # Returns the command line of a job with the folder for its notes.
    command: Callable[[Path], list[str]]
    problem: Callable[[], str]  # returns why it cannot run here; "" if it can
    # Returns the samples that were used before each world, where the notes lack it.
    starts: Callable[[Path], Mapping[int, int]] = lambda folder: {}


def _no_ulfm() -> str:
    try:
        require_tolerance(loaded_library(), "mpirun")
    except UsageError as error:
        return str(error)
    return ""


def _hvdtrain(*words: object) -> list[str]:
    run = [sys.executable, "-m", "hvdtrain", "run", "--elastic", "-np", RANKS, "--", *words]
    return [*map(str, run)]


def _train(folder: Path) -> list[str]:
    options = f"--epochs 1 --batch-size {BATCH} --lr 0.01 --lr-scaling none --device cpu"
    out = ("--checkpoint-every", "2epochs", "--out", folder / "run")
    return _hvdtrain("train", _HERE / "recipe.py", *options.split(), *out)


def _train_starts(folder: Path) -> dict[int, int]:
    file = folder / "run" / "summary.json"
    failures = json.loads(file.read_text(encoding="utf-8"))["failures"] if file.exists() else []
    return {n: one["step"] * BATCH * RANKS for n, one in enumerate(failures, start=1)}


def _script(folder: Path) -> list[str]:
    return _hvdtrain(_HERE / "script.py", "hvdtrain.torch", folder)


def _torchrun(folder: Path) -> list[str]:
    options = ["--nproc-per-node", RANKS, "--max-restarts", 1, "--standalone", "-m"]
    words = [sys.executable, "-m", "torch.distributed.run", *options, f"{_MODULE}.restarted"]
    # Else gloo meets addresses of killed processes in the store of torch 2.13, and fails again.
    return ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", *map(str, words), str(folder)]


def _horovod(folder: Path) -> list[str]:
    script = folder / "hosts.sh"
    lines = "".join(f"echo {name}:1\n" for name in (*_NAMES, socket.gethostname()))
    script.write_text(f"#!/bin/sh\n{lines}", encoding="utf-8")
    script.chmod(0o755)
    options = f"--gloo --network-interface lo -np {RANKS} --min-np {RANKS - 1}".split()
    launcher = [str(Path(sys.executable).with_name("horovodrun")), *options]
    job = [sys.executable, "-m", f"{_MODULE}.script", "horovod.torch", str(folder)]
    return [*launcher, "--host-discovery-script", str(script), *job]


def _no_horovod() -> str:
    if importlib.util.find_spec("horovod") is None:
        return "it is not installed: python -m hvdtrain build-horovod"
    if not os.access(Path(sys.executable).with_name("horovodrun"), os.X_OK):
        return "there is no horovodrun beside this Python"
    from horovod.common.util import gloo_built

    return "" if gloo_built() else "it was built without Gloo, which its elastic mode needs"


CONTENDERS = (
    ElasticContender("hvdtrain train", "mpirun of Open MPI 5", _train, _no_ulfm, _train_starts),
    ElasticContender(
        "hvdtrain, script with hvd.elastic",
        "mpirun of Open MPI 5; state.commit() in the script",
        _script,
        _no_ulfm,
    ),
    ElasticContender(
        "Horovod elastic",
        "horovodrun, which serves a rendezvous; a script that lists hosts; Gloo; ssh between "
        "hosts; state.commit() in the script",
        _horovod,
        _no_horovod,
    ),
    ElasticContender(
        "torchrun --max-restarts",
        "torchrun, which serves a rendezvous; checkpoints on a disk of all hosts, written and "
        "read by the script",
        _torchrun,
        lambda: "",
    ),
)


class UnfinishedJobError(Exception):
    """The job did not continue after the kill, or did not reach its end."""


@dataclass(frozen=True)
class Failure:
    # Time from the kill to the end of the first step on samples that were not used before it, on
    # the last rank.
    seconds: float
    next_seconds: float  # time from the kill to the end of the first step after it, new or not
    stages: dict[str, float]  # time of each stage in between, if the library's notes tell it
    step_seconds: float
    again: int  # samples of steps that were complete, and taken again
    twice: int  # samples that have changed the final weights more than once, counted once more each
    lost: int  # samples that have never changed the final weights


@dataclass
class _Step:
    samples: list[int] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    ranks: int = 0
    done: int = 0  # samples that are used after it, in the history of the weights

    @property
    def whole(self) -> bool:
        return len(self.ends) == self.ranks


def failure_of(
    notes: Mapping[int, Sequence[Note]],
    killed: float,
    samples: int,
    stages: Mapping[str, str],
    starts: Mapping[int, int],
) -> Failure:
    """Return what a kill cost.

    Stages have a title for each event that ends one, in order; the last ends with the next step.
    `starts` are samples that were used before the world of each number, where notes lack it.
    """
    starts, worlds = dict(starts), _worlds(notes)
    for lines in notes.values():
        for line in lines:
            if line["event"] == WORLD and line["done"] is not None:
                starts[line["generation"]] = line["done"]
    for number, steps in worlds.items():
        done = starts.get(number, 0)
        for step in steps:
            done += len(step.samples)
            step.done = done
    later = [step for number, steps in worlds.items() if number for step in steps if step.whole]
    reached = max((step.done for step in worlds[0] if step.ends), default=0)
    new = [step for step in later if step.done > reached]
    if not new or max(step.done for step in later) < samples:
        raise UnfinishedJobError("the job did not go on to its end after the kill")
    ends = sorted(max(step.ends) for step in worlds[0] if step.ends and max(step.ends) < killed)
    seconds = min(max(step.ends) for step in new) - killed
    again, used = _used(worlds, starts)
    return Failure(
        seconds=seconds,
        next_seconds=min(max(step.ends) for step in later) - killed,
        stages=_stages(notes, killed, stages, seconds),
        step_seconds=median(after - before for before, after in pairwise(ends)),
        again=again,
        twice=sum(count - 1 for count in used.values()),
        lost=samples - len(used),
    )


def _worlds(notes: Mapping[int, Sequence[Note]]) -> dict[int, list[_Step]]:
    found: dict[int, list[_Step]] = {}
    for lines in notes.values():
        steps: list[_Step] = []
        index, within = -1, False
        for line in lines:
            if line["event"] == WORLD:
                steps, index, within = found.setdefault(line["generation"], []), -1, False
            elif line["event"] == BEGIN:
                if not within:  # else another backward pass of the same step
                    index, within = index + 1, True
                    if index == len(steps):
                        steps.append(_Step())
                    steps[index].ranks += 1
                steps[index].samples += line["samples"]
            elif line["event"] == END:
                steps[index].ends.append(line["at"])
                within = False
    return found


def _used(
    worlds: Mapping[int, Sequence[_Step]], starts: Mapping[int, int]
) -> tuple[int, Counter[int]]:
    """Return how many samples of complete steps were taken again, and how often each counts."""
    used: Counter[int] = Counter()
    again = 0
    for number, steps in worlds.items():
        follows = [starts[later] for later in worlds if later > number]
        limit = min(follows, default=None)
        for step in steps:
            if limit is None or step.done <= limit:
                used.update(step.samples)
            elif step.ends:
                again += len(step.samples)
    return again, used


def _stages(
    notes: Mapping[int, Sequence[Note]], killed: float, stages: Mapping[str, str], seconds: float
) -> dict[str, float]:
    """Return the time of each stage: it ends when the last rank is through with it."""
    ends = [
        max(line["at"] for lines in notes.values() for line in lines if line["event"] == event)
        for event in list(stages)[:-1]
        if any(line["event"] == event for lines in notes.values() for line in lines)
    ]
    if not ends:
        return {}
    times = [killed, *ends, killed + seconds]
    lasted = (after - before for before, after in pairwise(times))
    return dict(zip(stages.values(), lasted, strict=True))


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
        ended = {
            pid: sum(line["event"] == END for line in lines)
            for pid, lines in read_notes(folder).items()
        }
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


def measure_kills(settings: MeasurementSettings, say: Callable[[str], None]) -> Result:
    """Run a job for each kill, and return what the kills cost with each library."""
    skipped: dict[str, str] = {}
    kills: dict[str, int] = {}
    for contender in CONTENDERS:
        problem = contender.problem()
        if problem:
            skipped[contender.name] = problem
        elif number := settings.kills if contender.name.startswith(OWN) else settings.peer_kills:
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


_JOBS = (NOT_ELASTIC, NOT_ELASTIC_AGAIN, ELASTIC)
_START_SECONDS, _GRACE_SECONDS = 120.0, 30.0
_AGREEMENT = 1e-4  # the TOLERANCE of cases/checked.py
_Job = Sequence[Connection]  # to its ranks


def measure_elastic_steps(
    launcher: RankLauncher, ranks: int, settings: MeasurementSettings, say: Callable[[str], None]
) -> Result:
    """Time a step of each model in an elastic job and in two others.

    The three jobs run at the same time; two of them wait while the third has its turn. They are
    started again several times, because the times of a job depend on where its memory is.
    """
    require_tolerance(launcher.library, "mpirun")
    launcher = replace(launcher, hostfile=None)  # they meet this process
    cases = []
    peers: list[PeerFacts] = []
    for model in settings.models:
        values: dict[str, list[float]] = {name: [] for name in _JOBS}
        title = model
        for start in range(settings.job_starts):
            say(f"  {ELASTIC_STEPS}: {model}, start {start + 1} of {settings.job_starts}")
            with _jobs(launcher, ranks, model, settings) as jobs:
                peers = []
                for name in _JOBS:
                    title, facts = jobs[name][0].recv()
                    peers.append(replace(facts, name=name))
                _take_turns(jobs, settings.repeats, values)
        about = {"model": model, "title": title}
        cases.append(Case(title, about, "seconds", values, NOT_ELASTIC, NOT_ELASTIC_AGAIN))
    return Result(ELASTIC_STEPS, ranks, 1, peers, {}, cases)


def _take_turns(jobs: dict[str, _Job], repeats: int, values: dict[str, list[float]]) -> None:
    moved: list[float] = []
    for repeat, name in in_turns(_JOBS, 1 + repeats):
        for rank in jobs[name]:
            rank.send(True)
        told = [rank.recv() for rank in jobs[name]]
        moved += [distance for _, distance in told]
        if repeat:  # the first one warms up
            values[name].append(max(seconds for seconds, _ in told))
    if not all(isclose(distance, moved[0], rel_tol=_AGREEMENT) for distance in moved):
        raise HvdtrainError(f"{ELASTIC_STEPS}: weights have moved by different distances: {moved}")


@contextmanager
def _jobs(
    launcher: RankLauncher, ranks: int, model: str, settings: MeasurementSettings
) -> Iterator[dict[str, _Job]]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        starting: dict[str, socket.socket] = {}
        commands = []
        for number, name in enumerate(_JOBS):
            address = str(folder / str(number))
            starting[name] = stack.enter_context(socket.socket(socket.AF_UNIX))
            starting[name].bind(address)
            starting[name].listen(ranks)
            starting[name].settimeout(_START_SECONDS)
            words = ("hvdtrain_bench.elastic.steps_rank", address, model, settings.steps_per_turn)
            elastic = name == ELASTIC
            commands.append(launcher.command(ranks, *words, launcher.threads, elastic=elastic))
        started = stack.enter_context(running(commands))
        jobs = {name: _connected(server, ranks, stack) for name, server in starting.items()}
        try:
            yield jobs
        except (EOFError, OSError):
            raise HvdtrainError(
                f"{ELASTIC_STEPS}: a rank has ended; its messages say why"
            ) from None
        for job in jobs.values():
            for rank in job:
                rank.send(False)
        wait(started, _GRACE_SECONDS)


def _connected(server: socket.socket, ranks: int, stack: ExitStack) -> _Job:
    found: dict[int, Connection] = {}
    while len(found) < ranks:
        try:
            accepted, _ = server.accept()
        except TimeoutError:
            raise HvdtrainError(
                f"{ELASTIC_STEPS}: {len(found)} of {ranks} ranks began within "
                f"{_START_SECONDS:.0f} s; their messages say why"
            ) from None
        rank = stack.enter_context(Connection(accepted.detach()))
        found[rank.recv()] = rank
    return [found[rank] for rank in range(ranks)]
