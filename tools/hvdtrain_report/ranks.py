"""Reader of ranks.jsonl: where the time of each rank went, in total and over time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import add
from pathlib import Path

from hvdtrain_report.lines import JsonObject, Lines, number

PARTS = ("compute", "waiting", "moving")
CPU, MEMORY = "cpu_percent", ("memory_bytes", "gpu_memory_bytes")
# A plot of all ranks over time has at most twice as many cells.
_CELLS = 100_000
_INTERVALS = 400
# More seconds or bytes than any machine has; sums of smaller values cannot overflow.
_TOO_MUCH = 1e18


@dataclass
class TimeInterval:
    step: int
    seconds: float  # from the start of the run to its end
    length: float  # in seconds
    parts: list[list[float]]  # seconds of each rank for each of PARTS, [3][N]
    system: dict[str, float | None]  # CPU usage and MEMORY by name; None if there are none


@dataclass
class TimeBreakdown:
    intervals: list[TimeInterval] = field(default_factory=list)
    # Seconds of each rank in which it waited less than all others.
    last_to_arrive: list[float] = field(default_factory=list)
    lines: int = 0
    latest_ranks: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        """Largest number of ranks that the run had."""
        return len(self.last_to_arrive)

    @property
    def totals(self) -> list[list[float]]:
        """Seconds of each rank over all intervals for each of PARTS, [3][N]."""
        return [
            [
                math.fsum(times)
                for times in zip(*(s.parts[part] for s in self.intervals), strict=True)
            ]
            for part in range(len(PARTS))
        ]


def read_ranks(path: Path) -> TimeBreakdown:
    times, lines = TimeBreakdown(), Lines(path)
    for chunk in lines:
        for place, line in enumerate(chunk):
            interval = _interval(line)
            if interval is None:
                raise lines.wrong(place, "step, seconds, span or the numbers of a rank are missing")
            _take(interval, times)
    if lines.torn:
        times.notes.append(f"The last line of {path.name} is torn and left out.")
    if len(times.intervals) < times.lines:
        times.notes.append(
            f"{times.lines:,} lines of {path.name} are added up to {len(times.intervals):,} spans."
        )
    return times


def _take(interval: TimeInterval, times: TimeBreakdown) -> None:
    size = len(interval.parts[0])
    before = times.latest_ranks
    if before not in (0, size):
        times.notes.append(
            f"From step {interval.step:,} on there are {size} ranks, before {before}: "
            "a rank that was not there has no time."
        )
    times.latest_ranks = size
    _widen(times, interval)
    times.last_to_arrive[_last(interval, size)] += interval.length
    times.intervals.append(interval)
    times.lines += 1
    limit = max(20, min(_INTERVALS, _CELLS // times.ranks))
    if len(times.intervals) >= 2 * limit:
        times.intervals = _joined(times.intervals)


def _interval(line: JsonObject) -> TimeInterval | None:
    """Return the interval of a line, or None if the line is damaged."""
    step, seconds, length = line.get("step"), number(line.get("seconds")), number(line.get("span"))
    if type(step) is not int or not seconds or not length or not seconds + length < _TOO_MUCH:
        return None
    parts = [_numbers(line.get(part)) for part in PARTS]
    if not parts[0] or any(len(part) != len(parts[0]) for part in parts):
        return None
    cpu = _numbers(line.get(CPU))
    return TimeInterval(
        step=step,
        seconds=seconds,
        length=length,
        parts=parts,
        system={CPU: math.fsum(cpu) / len(cpu) if cpu else None}
        | {name: max(_numbers(line.get(name)), default=None) for name in MEMORY},
    )


def _numbers(value: object) -> list[float]:
    """Return a list of plausible numbers, or an empty one for anything else."""
    if not isinstance(value, list):
        return []
    try:
        sane = math.isfinite(sum(value)) and max(map(abs, value), default=0) < _TOO_MUCH
    except (TypeError, OverflowError):
        return []
    return value if sane else []


def _last(interval: TimeInterval, size: int) -> int:
    """Return the rank that the others waited for: it waited least, and computed most."""
    compute, waiting = interval.parts[0], interval.parts[1]
    return min(range(size), key=lambda rank: (waiting[rank], -compute[rank]))


def _widen(times: TimeBreakdown, interval: TimeInterval) -> None:
    """Extend all intervals and totals to the same number of ranks."""
    size = max(times.ranks, len(interval.parts[0]))
    if size == times.ranks == len(interval.parts[0]):
        return
    for each in [*times.intervals, interval]:
        each.parts = [part + [0.0] * (size - len(part)) for part in each.parts]
    times.last_to_arrive += [0.0] * (size - times.ranks)


def _joined(intervals: Sequence[TimeInterval]) -> list[TimeInterval]:
    """Merge adjacent pairs."""
    pairs = zip(intervals[::2], intervals[1::2], strict=False)
    joined = [_together(first, second) for first, second in pairs]
    return joined + ([intervals[-1]] if len(intervals) % 2 else [])


def _together(first: TimeInterval, second: TimeInterval) -> TimeInterval:
    parts = [list(map(add, a, b)) for a, b in zip(first.parts, second.parts, strict=True)]
    length = first.length + second.length
    one, two = first.system, second.system
    cpu, then = one[CPU], two[CPU]
    if cpu is not None:
        cpu = None if then is None else (cpu * first.length + then * second.length) / length
    return TimeInterval(
        step=second.step,
        seconds=second.seconds,
        length=length,
        parts=parts,
        system={CPU: cpu} | {name: _larger(one[name], two[name]) for name in MEMORY},
    )


def _larger(one: float | None, two: float | None) -> float | None:
    return max((value for value in (one, two) if value is not None), default=None)
