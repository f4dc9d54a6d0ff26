"""metrics.csv: one row each time that values are logged, for spreadsheets and pandas."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from hvdtrain.files import replacing
from hvdtrain.train.tracking.files import AppendFile
from hvdtrain.train.tracking.tracker import RunInfo, Status

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

    @property
    def location(self) -> str:
        return str(self._path)

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
