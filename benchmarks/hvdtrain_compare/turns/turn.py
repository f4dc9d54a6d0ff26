"""Result of one turn of a contender: the measurements of its ranks, or why there are none."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hvdtrain_compare.protocol.rank_file import RankResult, result_file
from hvdtrain_compare.turns.jobs import JobEnd

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

    Args:
        limit: seconds after which it was ended.
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
