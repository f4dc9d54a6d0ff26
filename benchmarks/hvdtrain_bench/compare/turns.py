"""Run the processes of all contenders in turns, so that what slows the machine affects all."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hvdtrain.errors import UsageError
from hvdtrain.launch.cluster_environment import (
    ClusterRank,
    free_ports,
    torch_variables,
)
from hvdtrain.launch.launchers.choice import own_launcher
from hvdtrain.launch.launchers.mpi_library import find_mpirun, loaded_library
from hvdtrain.launch.launchers.request import LaunchRequest, without_allocation
from hvdtrain.topology import LOOPBACK
from hvdtrain.train.options import TrainOptions
from hvdtrain_bench.compare.meters import (
    ContenderTask,
    RankResult,
    Weights,
    read_result,
    result_file,
    write_task,
)
from hvdtrain_bench.compare.strategies import Launch, Strategy, StrategyContender
from hvdtrain_bench.harness.jobs import Command, JobEnd, running, wait
from hvdtrain_bench.harness.turns import in_turns

# Where they are set, ranks believe them rather than mpirun, and all take themselves for one rank.
_OF_TORCHRUN = ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE")
# The ranks compute on the CPU, whatever there is, and meet on this host alone.
_VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "",
    "GLOO_SOCKET_IFNAME": "lo",
    "JAX_PLATFORMS": "cpu",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}


def run_job(
    strategy: Strategy, ranks: int, task: Path, log: Path, python: str | None, limit: float
) -> JobEnd:
    """Run the processes of a contender on this host until all have ended, or one has failed."""
    worker = [python or sys.executable, "-m", "hvdtrain_bench.compare.worker", str(task)]
    # Nothing of a scheduler's or torchrun's that ranks go by.
    kept = without_allocation(os.environ)
    environ = {name: value for name, value in kept.items() if name not in _OF_TORCHRUN}
    commands = list(_commands(strategy, ranks, worker, environ))
    with log.open("ab") as output, running(commands, output) as started:
        return wait(started, limit)


def _commands(
    strategy: Strategy, ranks: int, worker: Sequence[str], environ: Mapping[str, str]
) -> Iterator[Command]:
    common = {**environ, **_VARIABLES}
    if strategy.launch is Launch.MPI:
        library = loaded_library(worker[0])
        launcher = own_launcher(library, str(find_mpirun(library)))
        line = launcher.command(LaunchRequest(tuple(worker), ranks=ranks), environ)
        yield Command(line.argv, {**common, **line.variables})
        return
    size = strategy.processes(ranks)
    addresses = tuple(f"{LOOPBACK}:{port}" for port in free_ports(size, LOOPBACK))
    for rank in range(size):
        place = ClusterRank(rank, size, rank, size, 0, addresses)
        yield Command(worker, {**common, **torch_variables(place)})


_LONGEST_LINE = 300
# Of a Python traceback, or of an interpreter: "path/python: Error while ...".
_ERROR = re.compile(r"(\S+: )?([\w.]*\.)?\w*(Error|Exception)\b")


@dataclass(frozen=True)
class Turn:
    ranks: tuple[RankResult, ...]

    @property
    def step_seconds(self) -> list[float]:
        """The time of each step: that of the slowest rank."""
        of_ranks = zip(*(rank.step_seconds for rank in self.ranks), strict=False)
        return list(map(max, of_ranks))

    @property
    def epoch_seconds(self) -> list[float]:
        """The time of each epoch: that of the slowest rank."""
        of_ranks = zip(*(rank.epoch_seconds for rank in self.ranks), strict=True)
        return list(map(max, of_ranks))


def failure(folder: Path, processes: int, end: JobEnd, log: Path, limit: float) -> str:
    """Return in one line why a turn failed; "" if it did not.

    The error of the rank that failed first is the cause; without one, it is what was printed last.
    Where ranks had to be ended, errors only say that.
    """
    if end.late:
        return f"it did not end within {limit:g} s, and was ended; --time-limit gives it more"
    errors = sorted(folder.glob("rank.*.error"), key=lambda path: path.stat().st_mtime_ns)
    if errors:
        rank = errors[0].name.split(".")[1]
        text = errors[0].read_text(encoding="utf-8", errors="replace")
        return _shortened(text if processes == 1 else f"{text} (rank {rank} of {processes})")
    ranks = range(processes)
    missing = [str(rank) for rank in ranks if not result_file(folder, rank).exists()]
    if not missing and end.code == 0:
        return ""
    said = _cause(log)
    if end.code:
        return _shortened(f"it ended with exit code {end.code}{said and f': {said}'}")
    return _shortened(f"rank {', '.join(missing)} ended without a result{said and f': {said}'}")


def _cause(log: Path) -> str:
    """Return the first line that names an error; without one, the last line."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace").replace("\0", "")
    except OSError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip(" -=")]
    return next(filter(_ERROR.match, lines), lines[-1] if lines else "")


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE - 3]}..."


@dataclass(frozen=True)
class Difference:
    """How far the weights of a contender are from those of one process with the whole batch."""

    checked: float
    steps: int
    final: float


def largest_difference(one: Weights, other: Weights) -> float:
    """Return max |a - b| over all weights of two models; NaN where one is not finite."""
    shapes = {name: weights.shape for name, weights in one.items()}
    others = {name: weights.shape for name, weights in other.items()}
    if shapes != others:
        odd = sorted({*shapes.items()} ^ {*others.items()})
        raise ValueError(f"the models differ in {odd[0][0]}")
    found = [np.abs(weights - other[name]).max(initial=0.0) for name, weights in one.items()]
    return float(np.max(found)) if found else 0.0


@dataclass(frozen=True)
class Outcome:
    contender: StrategyContender
    turns: tuple[Turn, ...]
    failure: str = ""
    difference: Difference | None = None


@dataclass(frozen=True)
class CommonSettings:
    options: TrainOptions
    ranks: int
    repeats: int
    check_steps: int
    limit_seconds: float
    out: Path


def run_turns(
    contenders: Sequence[StrategyContender], reference: StrategyContender, settings: CommonSettings
) -> list[Outcome]:
    """Run the contenders and the reference in turns; one that has failed gets no other turn.

    The others are compared with the weights of the reference, which comes first.
    """
    outcomes = {one.label: Outcome(one, ()) for one in (*contenders, reference)}
    expected: RankResult | None = None
    folder = settings.out / "turns"
    try:
        for repeat, contender in in_turns([reference, *contenders], settings.repeats):
            known = outcomes[contender.label]
            if known.failure:
                continue
            _say(f"repeat {repeat + 1} of {settings.repeats}: {contender.label}")
            try:
                turn = _turn(contender, repeat, settings, folder)
            except UsageError as error:
                _say(f"  {contender.label}: {error}")
                outcomes[contender.label] = replace(known, failure=str(error))
                continue
            if contender is reference and repeat == 0:
                expected = turn.ranks[0]
            if expected is not None and repeat == 0:
                first = turn.ranks[0]
                checked = largest_difference(expected.checked_weights, first.checked_weights)
                final = largest_difference(expected.final_weights, first.final_weights)
                difference = Difference(checked, first.checked_after, final)
                known = replace(known, difference=difference)
            ranks = [replace(rank, checked_weights={}, final_weights={}) for rank in turn.ranks]
            outcomes[contender.label] = replace(known, turns=(*known.turns, Turn(tuple(ranks))))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return list(outcomes.values())


def _turn(
    contender: StrategyContender, repeat: int, settings: CommonSettings, shared: Path
) -> Turn:
    """Start the processes of a contender, and return what they have measured.

    Raises UsageError with the reason if they fail.
    """
    strategy = contender.strategy
    processes = strategy.processes(settings.ranks)
    name = "".join(c if c.isalnum() else "-" for c in f"{contender.label}-{repeat + 1}")
    folder, log = (shared / name).absolute(), settings.out / "logs" / f"{name}.log"
    for path in (folder, log.parent):
        path.mkdir(parents=True, exist_ok=True)
    task = ContenderTask(
        strategy.name,
        contender.variant,
        settings.options,
        settings.ranks,
        settings.check_steps,
        keeps_weights=repeat == 0,
        folder=folder,
        shared=folder.parent,
    )
    file, limit = folder / "task", settings.limit_seconds
    try:
        write_task(file, task)
        end = run_job(strategy, settings.ranks, file, log, contender.python, limit)
        if failed := failure(folder, processes, end, log, limit):
            raise UsageError(failed)
        return Turn(tuple(read_result(result_file(folder, rank)) for rank in range(processes)))
    except OSError as error:
        raise UsageError(f"{type(error).__name__}: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
