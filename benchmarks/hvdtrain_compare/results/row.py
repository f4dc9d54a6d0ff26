"""What a comparison says of one contender."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

from hvdtrain_compare.figures import (
    Ratio,
    SampleCount,
    Timing,
    count_samples,
    judge,
    judge_same,
    noise_of,
    noise_text,
    ratio_to,
    time_steps,
    without_start,
    worst,
)
from hvdtrain_compare.turns import Difference, Outcome, Turn


@dataclass(frozen=True)
class Row:
    """One contender."""

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


def make_rows(outcomes: list[Outcome], ranks: int) -> list[Row]:
    """Return a row for each contender, compared with the first one that has a name on --with."""
    rows = [_row(one, ranks) for one in outcomes]
    base = rows[0].step
    if base is None:
        return rows
    own = _own_ratios(outcomes, rows)
    noise = noise_of(list(own.values()))
    title = outcomes[0].contender.title
    others = zip(outcomes[1:], rows[1:], strict=True)
    return [
        rows[0],
        *(
            _judged(row, base, outcome.contender.title == title, own.get(row.label), noise)
            for outcome, row in others
        ),
    ]


def _own_ratios(outcomes: list[Outcome], rows: list[Row]) -> dict[str, Ratio]:
    """Return the ratio of each contender that takes part again to its first time, by label."""
    firsts: dict[str, Timing] = {}
    found = {}
    for outcome, row in zip(outcomes, rows, strict=True):
        if row.step is not None:
            first = firsts.setdefault(outcome.contender.title, row.step)
            if row.step is not first:
                found[row.label] = ratio_to(first, row.step)
    return found


def _judged(row: Row, base: Timing, is_base: bool, own: Ratio | None, noise: float) -> Row:
    """Return the row with its ratio to the base, and what can be said of it."""
    if row.step is None:
        return row
    ratio = ratio_to(base, row.step)
    verdict = judge_same(ratio) if is_base else judge(ratio, noise)
    notes = row.notes if own is None else (*row.notes, noise_text(own, noise))
    return replace(row, ratio=ratio, verdict=verdict, notes=notes)


def _timing(outcome: Outcome) -> Timing:
    return time_steps([without_start(turn.step_seconds) for turn in outcome.turns])


def _row(outcome: Outcome, ranks: int) -> Row:
    """Return what was measured of a contender alone."""
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
    return replace(
        about,
        library=first[0].library,
        threads=first[0].threads,
        step=_timing(outcome),
        epoch_seconds=median(epochs),
        difference=outcome.difference,
        trained=worst([count_samples(parts, first[0].samples) for parts in passes]),
        evaluated=_evaluated(outcome.turns[0]),
        scores=_scores(outcome.turns[0]),
        memory_bytes=max(rank.peak_memory_bytes for turn in outcome.turns for rank in turn.ranks),
        socket_bytes=_socket_bytes(outcome.turns),
        notes=tuple(dict.fromkeys(note for rank in first for note in rank.notes)),
    )


def _evaluated(turn: Turn) -> SampleCount | None:
    samples = turn.ranks[0].test_samples
    return count_samples([rank.evaluated for rank in turn.ranks], samples) if samples else None


def _scores(turn: Turn) -> dict[str, float]:
    found = {}
    for name in turn.ranks[0].scores:
        total, count = (sum(rank.scores[name][n] for rank in turn.ranks) for n in (0, 1))
        found[name] = total / count if count else float("nan")
    return found


def _socket_bytes(turns: tuple[Turn, ...]) -> float | None:
    known = [turn.ranks[0].socket_bytes_per_step for turn in turns]
    return median([nbytes for nbytes in known if nbytes is not None]) if None not in known else None
