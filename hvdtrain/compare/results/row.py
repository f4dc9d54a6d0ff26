"""What a comparison says of one contender."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

from hvdtrain.compare.figures.accounting import SampleCount, count_samples, worst
from hvdtrain.compare.figures.judge import Ratio, Timing, judge, ratio_to, time_steps, without_start
from hvdtrain.compare.turns.outcome import Difference, Outcome
from hvdtrain.compare.turns.turn import Turn

__all__ = ["Row", "make_rows"]


@dataclass(frozen=True)
class Row:
    """One contender.

    Attributes:
        label: name of the contender.
        summary: what it does.
        processes: number of processes.
        lines: number of lines that a user adds to a script for one process, or changes.
        code: these lines.
        failure: why it has not run, in one line; the attributes below are then empty.
        library: name and version of what communicates.
        threads: number of threads of a rank; None: unknown.
        step: time of a step.
        ratio: relative to the first contender; None for itself, and if that has not run.
        verdict: whether there is a difference to the first contender.
        epoch_seconds: median time of an epoch.
        difference: distance from one process; None if that has not run.
        trained: samples of the epoch with the most duplicates and losses.
        evaluated: samples of the evaluation; None without test samples.
        scores: mean over the evaluated samples by name.
        memory_bytes: most memory of a process.
        socket_bytes: bytes that all processes send through sockets in a step; None: unknown.
        notes: remarks for people.
    """

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
    """Return a row for each contender, compared with the first one that has a name on --with.

    Args:
        outcomes: what came of each contender; the reference is the last one.
        ranks: number of ranks.
    """
    base = outcomes[0]
    timings = {id(one): _timing(one) for one in outcomes if not one.failure}
    of_base = timings.get(id(base))
    return [_row(one, base, timings.get(id(one)), of_base, ranks) for one in outcomes]


def _timing(outcome: Outcome) -> Timing:
    return time_steps([without_start(turn.step_seconds) for turn in outcome.turns])


def _row(
    outcome: Outcome, base: Outcome, step: Timing | None, of_base: Timing | None, ranks: int
) -> Row:
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
    if step is None:
        return about
    first = outcome.turns[0].ranks
    compared = None if of_base is None or outcome is base else of_base
    same = contender.title == base.contender.title
    epochs = [seconds for turn in outcome.turns for seconds in turn.epoch_seconds]
    passes = zip(*(rank.trained for rank in first), strict=True)
    return replace(
        about,
        library=first[0].library,
        threads=first[0].threads,
        step=step,
        ratio=None if compared is None else ratio_to(compared, step),
        verdict="" if compared is None else judge(compared, step, same),
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
