"""What a comparison says of one contender: counts of samples, times, and what follows. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from hvdtrain.data.sampling import Indices
from hvdtrain_bench.analysis.judge import compared, noise_of, paired_ratios, spread
from hvdtrain_bench.compare.turns import Difference, Outcome


@dataclass(frozen=True)
class SampleCount:
    samples: int
    seen: int
    duplicates: int
    lost: int

    @property
    def text(self) -> str:
        parts = [f"{self.seen}"]
        if self.duplicates:
            parts.append(f"{self.duplicates} twice")
        if self.lost:
            parts.append(f"{self.lost} never")
        return ", ".join(parts)


def count_samples(parts: Sequence[Indices], samples: int) -> SampleCount:
    used = np.concatenate([np.zeros(0, np.int64), *parts])
    if len(used) and not 0 <= used.min() <= used.max() < samples:
        raise ValueError(f"samples are numbered from 0 to {samples - 1}, got {used.max()}")
    times = np.bincount(used, minlength=samples)
    return SampleCount(
        samples, len(used), int((times - 1).clip(min=0).sum()), int((times == 0).sum())
    )


def worst(counts: Sequence[SampleCount]) -> SampleCount:
    """Return the pass with the most duplicates and losses."""
    return max(counts, key=lambda count: (count.duplicates + count.lost, count.seen))


# The first steps open connections, and make memory and plans.
_MOST_FIRST_STEPS = 10


@dataclass(frozen=True)
class Timing:
    seconds: float  # the median of the medians of the repeats
    low: float
    high: float
    repeats: tuple[float, ...]


@dataclass(frozen=True)
class Ratio:
    """The time of a contender relative to another one's in the same repeats."""

    middle: float
    low: float
    high: float
    repeats: tuple[float, ...]


def without_start(seconds: Sequence[float]) -> list[float]:
    """Return the times of steps without those of the first ones: ten, or a quarter of a few."""
    return list(seconds[min(_MOST_FIRST_STEPS, len(seconds) // 4) :])


def time_steps(repeats: Sequence[Sequence[float]]) -> Timing:
    medians = [median(steps) for steps in repeats]
    low, high = spread([seconds for steps in repeats for seconds in steps])
    return Timing(median(medians), min(low, *medians), max(high, *medians), tuple(medians))


def ratio_to(base: Timing, other: Timing) -> Ratio:
    """Return how a contender compares with another one, repeat by repeat."""
    ratios = tuple(paired_ratios(base.repeats, other.repeats))
    return Ratio(median(ratios), min(ratios), max(ratios), ratios)


@dataclass(frozen=True)
class Row:
    label: str
    summary: str
    processes: int
    lines: int
    code: str
    failure: str = ""
    library: str = ""
    threads: int | None = None
    step: Timing | None = None
    ratio: Ratio | None = None
    verdict: str = ""
    epoch_seconds: float | None = None
    difference: Difference | None = None
    trained: SampleCount | None = None
    evaluated: SampleCount | None = None
    scores: Mapping[str, float] | None = None
    memory_bytes: int | None = None
    socket_bytes: float | None = None
    notes: tuple[str, ...] = ()


def make_rows(outcomes: Sequence[Outcome], ranks: int) -> list[Row]:
    """Return a row for each contender, compared with the first one that has a name on --with."""
    rows = [_row(one, ranks) for one in outcomes]
    times = {row.label: row.step for row in rows if row.step is not None}
    if rows[0].label not in times:
        return rows
    firsts: dict[str, str] = {}
    same: dict[str, str] = {}
    for label, title in ((one.contender.label, one.contender.title) for one in outcomes):
        if label in times and (first := firsts.setdefault(title, label)) != label:
            same[label] = first
    values = {label: timing.repeats for label, timing in times.items()}
    noise, base = noise_of(values, same), times[rows[0].label]
    verdicts = {one.name: one.verdict for one in compared(values, rows[0].label, same)}

    def judged(row: Row, step: Timing) -> Row:
        ratio = None if row is rows[0] else ratio_to(base, step)
        notes = row.notes
        if row.label in same:
            own = ratio_to(times[same[row.label]], step)
            notes = (
                *notes,
                f"the same code took {own.low:.2f} to {own.high:.2f} of its own time: median "
                f"ratios of {1 / noise:.2f} to {noise:.2f} are noise",
            )
        return replace(row, ratio=ratio, verdict=verdicts[row.label], notes=notes)

    return [row if row.step is None else judged(row, row.step) for row in rows]


def _row(outcome: Outcome, ranks: int) -> Row:
    contender = outcome.contender
    strategy = contender.strategy
    about = Row(
        label=contender.label,
        summary=strategy.summary,
        processes=strategy.processes(ranks),
        lines=strategy.lines,
        code=strategy.code,
        failure=outcome.failure,
    )
    if outcome.failure:
        return about
    first = outcome.turns[0].ranks
    epochs = [seconds for turn in outcome.turns for seconds in turn.epoch_seconds]
    passes = zip(*(rank.trained for rank in first), strict=True)
    tested = first[0].test_samples
    evaluated = count_samples([rank.evaluated for rank in first], tested) if tested else None
    sent = [turn.ranks[0].socket_bytes_per_step for turn in outcome.turns]
    known = [nbytes for nbytes in sent if nbytes is not None]
    scores = {}
    for name in first[0].scores:
        total, count = (sum(rank.scores[name][n] for rank in first) for n in (0, 1))
        scores[name] = total / count if count else float("nan")
    return replace(
        about,
        library=first[0].library,
        threads=first[0].threads,
        step=time_steps([without_start(turn.step_seconds) for turn in outcome.turns]),
        epoch_seconds=median(epochs),
        difference=outcome.difference,
        trained=worst([count_samples(parts, first[0].samples) for parts in passes]),
        evaluated=evaluated,
        scores=scores,
        memory_bytes=max(rank.peak_memory_bytes for turn in outcome.turns for rank in turn.ranks),
        socket_bytes=median(known) if len(known) == len(sent) else None,
        notes=tuple(dict.fromkeys(note for rank in first for note in rank.notes)),
    )
