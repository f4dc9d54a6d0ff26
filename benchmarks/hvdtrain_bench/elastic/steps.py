"""The cost of being elastic: steps of jobs with and without fault tolerance, in turns."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import isclose
from multiprocessing.connection import Connection
from pathlib import Path

from hvdtrain.errors import HvdtrainError
from hvdtrain.launch.launchers.options import require_tolerance
from hvdtrain_bench.analysis.judge import ELASTIC, ELASTIC_STEPS, NOT_ELASTIC, NOT_ELASTIC_AGAIN
from hvdtrain_bench.harness.jobs import RankLauncher, running, wait
from hvdtrain_bench.harness.results import Case, PeerFacts, Result
from hvdtrain_bench.harness.settings import MeasurementSettings
from hvdtrain_bench.harness.turns import in_turns

_JOBS = (NOT_ELASTIC, NOT_ELASTIC_AGAIN, ELASTIC)
_START_SECONDS, _GRACE_SECONDS = 120.0, 30.0
_AGREEMENT = 1e-4  # as in steps.py
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
                facts = [(name, jobs[name][0].recv()) for name in _JOBS]
                peers = [PeerFacts(name, *told["facts"]) for name, told in facts]
                title = facts[0][1]["title"]
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
        wait(started, started, _GRACE_SECONDS)


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
