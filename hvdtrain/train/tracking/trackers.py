"""All trackers of a run as one, metrics.csv first."""

from __future__ import annotations

import csv
import importlib.util
import io
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.files import replacing
from hvdtrain.train.tracking.tracker import AppendFile, RunInfo, Status, Tracker, masked, one_line

METRICS_CSV = "metrics.csv"
_FIRST_COLUMNS = ("step", "seconds")


class CsvFile:
    """Tracker that writes metrics.csv: step, seconds, then a column for each name it has seen.

    Rows after the step that a run is resumed from are dropped. A cell is empty if the row has no
    such value.
    """

    def __init__(self, info: RunInfo) -> None:
        self._path = info.directory / METRICS_CSV
        self._columns: list[str] = list(_FIRST_COLUMNS)
        rows: list[list[str]] = []
        if info.resumed_step is not None and self._path.exists():
            self._columns, rows = _read(self._path)
            rows = [row for row in rows if int(row[0]) <= info.resumed_step]
        self._file = self._rewrite(rows)

    def log(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        new = [name for name in values if name not in self._columns]
        if new:
            self._grow(new)
        cells: dict[str, float] = {**values, "step": step, "seconds": seconds}
        row = [repr(cells[name]) if name in cells else "" for name in self._columns]
        self._file.write(_lines([row]))

    def artifact(self, path: Path) -> None:
        """Do nothing: the file is in the same directory."""

    def end(self, status: Status) -> None:
        self._file.close()

    def _grow(self, new: Sequence[str]) -> None:
        _, rows = _read(self._path)
        before, self._columns = self._columns, [*self._columns, *new]
        try:
            file = self._rewrite([[*row, *[""] * len(new)] for row in rows])
        except OSError:
            self._columns = before
            raise
        self._file.close()
        self._file = file

    def _rewrite(self, rows: Iterable[Sequence[str]]) -> AppendFile:
        """Replace the file atomically, and open it for appending."""
        with replacing(self._path) as file:
            file.write(_lines([self._columns, *rows]))
        return AppendFile(self._path)


def _read(path: Path) -> tuple[list[str], list[list[str]]]:
    """Return the columns and the complete rows."""
    text = path.read_text(encoding="utf-8", errors="replace")
    whole = text[: text.rfind("\n") + 1].split("\n")[:-1]
    columns, *rows = list(csv.reader(whole)) or [list(_FIRST_COLUMNS)]
    if tuple(columns[:2]) != _FIRST_COLUMNS:
        return list(_FIRST_COLUMNS), []
    return columns, [row for row in rows if len(row) == len(columns) and row[0].isdecimal()]


def _lines(rows: Iterable[Sequence[str]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


TRACKERS = ("tensorboard", "mlflow", "wandb")

Warn = Callable[[str], None]


def tracker_names(names: str) -> tuple[str, ...]:
    """Return the trackers that a comma-separated list names, each once."""
    found = tuple(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    for name in found:
        if name not in TRACKERS:
            raise UsageError(f"unknown --track {name!r}: choose from {', '.join(TRACKERS)}")
    return found


class Trackers:
    """The trackers of a run; used on rank 0 only.

    Nothing is raised: a tracker that fails is reported once, and tried again the next time.
    """

    def __init__(self, trackers: Mapping[str, Tracker], warn: Warn) -> None:
        self._trackers = dict(trackers)
        self._warn = warn
        self._warned: set[str] = set()

    def log(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        plain = {name: float(value) for name, value in values.items()}
        self._each(lambda tracker: tracker.log(plain, int(step), float(seconds)))

    def artifact(self, path: Path) -> None:
        self._each(lambda tracker: tracker.artifact(path))

    def end(self, status: Status) -> None:
        trackers, self._trackers = self._trackers, {}
        for name, tracker in trackers.items():
            try:
                tracker.end(status)
            except Exception as error:
                self._warn(f"{name}: {one_line(error)}")

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in self._trackers.items():
            try:
                call(tracker)
            except Exception as error:  # training is worth more than any tracker
                if name not in self._warned:
                    self._warned.add(name)
                    self._warn(f"{name}: {one_line(error)}; training continues")


def open_trackers(
    names: str,
    info: RunInfo,
    tracking_uri: str | None = None,
    experiment: str | None = None,
    run_name: str | None = None,
    warn: Warn | None = None,
) -> Trackers:
    """Open metrics.csv and the trackers that a comma-separated list names (rank 0 only)."""
    wanted = tracker_names(names)
    for name in wanted:
        if importlib.util.find_spec(name) is None:
            raise UsageError(
                f"--track {name} needs the package {name}, which is not installed: "
                f"pip install {name}"
            )
    parameters = {
        key: value if isinstance(value, bool | int | float | None) else masked(str(value))
        for key, value in info.parameters.items()
    }
    info = replace(info, parameters=parameters)
    opened: dict[str, Tracker] = {"csv": CsvFile(info)}
    try:
        for name in wanted:
            opened[name] = _open(name, info, tracking_uri, experiment, run_name)
    except BaseException:
        Trackers(opened, warn or _print).end("failed")
        raise
    return Trackers(opened, warn or _print)


def _open(
    name: str, info: RunInfo, uri: str | None, experiment: str | None, run_name: str | None
) -> Tracker:
    try:
        if name == "tensorboard":
            from hvdtrain.train.tracking.tensorboard import TensorBoard

            return TensorBoard(info)
        if name == "mlflow":
            from hvdtrain.train.tracking.mlflow import Mlflow

            return Mlflow(info, uri, experiment, run_name)
        from hvdtrain.train.tracking.wandb import Wandb

        return Wandb(info, experiment, run_name)
    except ImportError as error:
        raise UsageError(
            f"--track {name}: the package {name} is installed, but does not load "
            f"({one_line(error)}): pip install --force-reinstall {name}"
        ) from error


def _print(line: str) -> None:
    print(f"hvdtrain: {line}", file=sys.stderr, flush=True)
