"""Readers of metrics.jsonl and steps.jsonl: curves by split and metric, and confusion matrices."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path

from hvdtrain_report.lines import JsonObject, Lines, number

# Number of pixels that a wide screen has for a curve.
BUCKETS = 1000

_PLACE = frozenset({"epoch", "step", "split", "seconds"})


@dataclass(frozen=True)
class Curve:
    """One metric of one split over the run."""

    split: str
    metric: str
    step: list[int]
    epoch: list[float]
    seconds: list[float]  # of each point since the start; NaN if its line has none
    value: list[float]
    lines: int
    not_finite: int


@dataclass(frozen=True)
class Matrix:
    split: str
    metric: str
    epoch: float
    rows: list[list[float]]  # counts, [true class][predicted class]


@dataclass
class RunMeasurements:
    curves: list[Curve] = field(default_factory=list)
    matrices: list[Matrix] = field(default_factory=list)
    last: dict[str, dict[str, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class _Split:
    """The columns of one split while lines are read."""

    def __init__(self) -> None:
        self.step, self.epoch, self.seconds = array("q"), array("d"), array("d")
        self.rows: dict[str, array[int]] = {}
        self.values: dict[str, array[float]] = {}

    def add(self, metric: str, values: Sequence[float]) -> None:
        """Add the values of the last rows."""
        if metric not in self.values:
            self.rows[metric], self.values[metric] = array("q"), array("d")
        count = len(self.step)
        self.rows[metric].extend(range(count - len(values), count))
        self.values[metric].extend(values)


@dataclass
class _Found:
    splits: dict[str, _Split] = field(default_factory=dict)
    matrices: dict[tuple[str, str], Matrix] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)


def read_curves(paths: Iterable[Path]) -> RunMeasurements:
    """Read files of metrics, which may have a million lines."""
    found, measured = _Found(), RunMeasurements()
    for path in paths:
        lines = Lines(path)
        for chunk in lines:
            _take_chunk(chunk, lines, found)
        if lines.torn:
            measured.notes.append(f"The last line of {path.name} is torn and left out.")
    for name in sorted(found.unknown):
        measured.notes.append(f"{name} is neither a number nor a square matrix, and is not shown.")
    for split, columns in found.splits.items():
        measured.curves += [_curve(split, metric, columns, measured) for metric in columns.values]
    measured.matrices = list(found.matrices.values())
    measured.notes += _thinning_note(measured.curves)
    return measured


def _take_chunk(chunk: Sequence[JsonObject], lines: Lines, found: _Found) -> None:
    """Sort lines into columns; adjacent lines with the same split and fields are added at once."""
    for place, line in enumerate(chunk):
        step, epoch = line.get("step"), number(line.get("epoch"))
        if type(line.get("split")) is not str or type(step) is not int or not 0 <= step < 2**53:
            raise lines.wrong(place, "split or step is missing")
        if epoch is None:
            raise lines.wrong(place, "epoch is not a number")
    for (split, *names), group in groupby(chunk, lambda line: (line["split"], *line)):
        rows = list(group)
        columns = found.splits.get(split) or found.splits.setdefault(split, _Split())
        columns.step.extend(row["step"] for row in rows)
        columns.epoch.extend(_finite(number(row.get("epoch"))) for row in rows)
        columns.seconds.extend(_finite(number(row.get("seconds"))) for row in rows)
        for name in names:
            if name not in _PLACE:
                _take_values(name, rows, columns, found)


def _take_values(name: str, rows: list[JsonObject], columns: _Split, found: _Found) -> None:
    values = [row[name] for row in rows]
    if set(map(type, values)) == {float} and math.isfinite(sum(values)):
        columns.add(name, values)
    elif all(number(value) is not None for value in values):
        columns.add(name, [_finite(number(value)) for value in values])
    elif (square := _square(values[-1])) is not None:
        last = rows[-1]
        matrix = Matrix(last["split"], name, _finite(number(last.get("epoch"))), square)
        found.matrices[matrix.split, name] = matrix
    else:
        found.unknown.add(name)


def _finite(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else math.nan


def _square(value: object) -> list[list[float]] | None:
    """Return a square matrix of numbers, or None for anything else."""
    if not isinstance(value, list) or not value:
        return None
    for row in value:
        if not isinstance(row, list) or len(row) != len(value):
            return None
        if not all(math.isfinite(_finite(number(cell))) for cell in row):
            return None
    return value


def _curve(split: str, metric: str, columns: _Split, measured: RunMeasurements) -> Curve:
    """Sort the points of a curve, and leave out those that its plot does not need."""
    rows, values = columns.rows[metric], columns.values[metric]
    steps = [columns.step[row] for row in rows]
    order: Sequence[int] = range(len(rows))
    if any(after <= before for before, after in pairwise(steps)):
        # The dictionary keeps the later of two lines of a step.
        last = {step: place for place, step in enumerate(steps)}
        order = [last[step] for step in sorted(last)]
        if len(order) < len(rows):
            twice = len(rows) - len(order)
            measured.notes.append(
                f"{metric} ({split}): {twice} {'line' if twice == 1 else 'lines'} more than steps; "
                "of two lines of a step the later counts."
            )
    shown = [order[place] for place in thinned([values[place] for place in order])]
    measured.last.setdefault(split, {})[metric] = values[order[-1]]
    return Curve(
        split=split,
        metric=metric,
        step=[steps[place] for place in shown],
        epoch=[columns.epoch[rows[place]] for place in shown],
        seconds=[columns.seconds[rows[place]] for place in shown],
        value=[values[place] for place in shown],
        lines=len(order),
        not_finite=sum(1 for place in order if math.isnan(values[place])),
    )


def _thinning_note(curves: Sequence[Curve]) -> list[str]:
    longest = max(curves, key=lambda curve: curve.lines, default=None)
    if longest is None or longest.lines == len(longest.step):
        return []
    return [
        f"Curves of more than 2,000 points are thinned: of {longest.lines:,} points of "
        f"{longest.metric} ({longest.split}), the page holds {len(longest.step):,}: the lowest and "
        "the highest of each of 1,000 equal stretches. Each is a line of the file, unchanged."
    ]


def thinned(values: Sequence[float], buckets: int = BUCKETS) -> list[int]:
    """Return the indices of the values that a plot needs, in order.

    These are the first and the last value, and the minimum, the maximum and the first NaN of each
    of `buckets` equal intervals. All indices are returned if they are no more than that.
    """
    count = len(values)
    if count <= 2 * buckets:
        return list(range(count))
    places = {0, count - 1}
    for bucket in range(buckets):
        low, high = bucket * count // buckets, (bucket + 1) * count // buckets
        part = values[low:high]
        # If only the sum overflows, the slower path gives the same result.
        if math.isfinite(sum(part)):
            places.update((low + part.index(min(part)), low + part.index(max(part))))
        else:
            places.update(low + place for place in _extremes(part))
    return sorted(places)


def _extremes(part: Sequence[float]) -> set[int]:
    """Return the indices of the minimum, the maximum and the first NaN."""
    finite = [place for place, value in enumerate(part) if math.isfinite(value)]
    # There is none if only the sum has overflowed.
    first = next((place for place, value in enumerate(part) if not math.isfinite(value)), None)
    places = set() if first is None else {first}
    if finite:
        places |= {min(finite, key=part.__getitem__), max(finite, key=part.__getitem__)}
    return places
