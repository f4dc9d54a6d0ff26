"""Run all contenders in turns, repeat after repeat, so that what slows the machine affects all."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.errors import UsageError
from hvdtrain_compare.contenders import Contender
from hvdtrain_compare.figures import largest_difference
from hvdtrain_compare.jobs import JobEnd, run_job
from hvdtrain_compare.protocol import RankResult, Task, result_file

_LONGEST_LINE = 300
# Of a Python traceback, or of an interpreter: "path/python: Error while ...".
_ERROR = re.compile(r"(\S+: )?([\w.]*\.)?\w*(Error|Exception)\b")


@dataclass(frozen=True)
class Turn:
    """One turn of a contender."""

    ranks: tuple[RankResult, ...]

    @property
    def step_seconds(self) -> list[float]:
        """The time of each step: that of the slowest rank."""
        steps = min(len(rank.step_seconds) for rank in self.ranks)
        slowest = np.max([rank.step_seconds[:steps] for rank in self.ranks], axis=0)
        return [float(seconds) for seconds in slowest]

    @property
    def epoch_seconds(self) -> list[float]:
        """The time of each epoch: that of the slowest rank."""
        slowest = np.max([rank.epoch_seconds for rank in self.ranks], axis=0)
        return [float(seconds) for seconds in slowest]


def read_turn(folder: Path, processes: int) -> Turn:
    """Read the files of all ranks."""
    ranks = range(processes)
    return Turn(tuple(RankResult.read(result_file(folder, rank)) for rank in ranks))


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


@dataclass(frozen=True)
class Outcome:
    """Result of all turns of one contender."""

    contender: Contender
    turns: tuple[Turn, ...]
    failure: str = ""
    difference: Difference | None = None


_TURNS = "turns"


@dataclass(frozen=True)
class Settings:
    """What all contenders have in common."""

    options: Mapping[str, Any]
    ranks: int
    repeats: int
    check_steps: int
    limit_seconds: float
    out: Path


def run_turns(
    contenders: Sequence[Contender],
    reference: Contender,
    settings: Settings,
    say: Callable[[str], None],
) -> list[Outcome]:
    """Run the contenders and the reference in turns.

    In every other repeat the order is reversed. A contender that has failed gets no other turn.
    """
    turns = _AllTurns(settings, say)
    # In the first repeat the reference comes first: the others are compared with its weights.
    order = [reference, *contenders]
    try:
        for repeat in range(settings.repeats):
            for contender in order if repeat % 2 == 0 else reversed(order):
                turns.run(contender, repeat)
    finally:
        shutil.rmtree(settings.out / _TURNS, ignore_errors=True)
    return [turns.outcomes[contender.label] for contender in [*contenders, reference]]


class _AllTurns:
    """Runs turns, and keeps their results."""

    def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
        self._settings, self._say = settings, say
        self._reference: RankResult | None = None
        self.outcomes: dict[str, Outcome] = {}

    def run(self, contender: Contender, repeat: int) -> None:
        """Give a contender its turn, unless it has failed."""
        known = self.outcomes.get(contender.label, Outcome(contender, ()))
        if known.failure:
            return
        self._say(f"repeat {repeat + 1} of {self._settings.repeats}: {contender.label}")
        turn, failed = self._turn(contender, repeat)
        if turn is None:
            self._say(f"  {contender.label}: {failed}")
            self.outcomes[contender.label] = replace(known, failure=failed)
            return
        difference = known.difference if repeat else self._difference(turn)
        turns = (*known.turns, _without_weights(turn))
        self.outcomes[contender.label] = Outcome(contender, turns, difference=difference)

    def _turn(self, contender: Contender, repeat: int) -> tuple[Turn | None, str]:
        """Return the measurements, or None and why there are none."""
        settings, strategy = self._settings, contender.strategy
        processes = strategy.processes(settings.ranks)
        name = "".join(c if c.isalnum() else "-" for c in f"{contender.label}-{repeat + 1}")
        folder = settings.out / _TURNS / name
        log = settings.out / "logs" / f"{name}.log"
        for path in (folder, log.parent):
            path.mkdir(parents=True, exist_ok=True)
        task = Task(
            strategy.name,
            contender.variant,
            settings.options,
            settings.ranks,
            settings.check_steps,
            keeps_weights=repeat == 0,
            folder=str(folder.absolute()),
            shared=str(folder.parent.absolute()),
        )
        try:
            task.write(folder / "task.json")
            end = run_job(
                strategy,
                settings.ranks,
                (folder / "task.json").absolute(),
                log,
                contender.python,
                settings.limit_seconds,
            )
            failed = failure(folder, processes, end, log, settings.limit_seconds)
            return (None, failed) if failed else (read_turn(folder, processes), "")
        except UsageError as error:
            return None, str(error)
        except OSError as error:
            return None, f"{type(error).__name__}: {error}"
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _difference(self, turn: Turn) -> Difference | None:
        """Compare the weights of rank 0 with those of the reference, which has the first turn."""
        first = turn.ranks[0]
        if not self.outcomes:
            self._reference = first
        reference = self._reference
        if reference is None:
            return None
        return Difference(
            largest_difference(reference.checked_weights, first.checked_weights),
            first.checked_after,
            largest_difference(reference.final_weights, first.final_weights),
        )


def _without_weights(turn: Turn) -> Turn:
    return Turn(tuple(replace(rank, checked_weights={}, final_weights={}) for rank in turn.ranks))
