"""Sentences that summarize the plots: where ranks spent their time, which classes are confused."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low

from hvdtrain_report.curves import Matrix
from hvdtrain_report.ranks import TimeBreakdown

# Share of the median rank's time below which a difference is noise.
_STANDS_OUT = 0.05


def verdict(times: TimeBreakdown, hosts: Sequence[str] = ()) -> str:
    """Return the most important facts about the time of the ranks, in a few sentences."""
    compute, waiting, moving = times.totals
    total = sum(compute) + sum(waiting) + sum(moving)
    if total <= 0:
        return "The ranks have no time in ranks.jsonl yet."
    shares = " ".join(
        f"{name} {_percent(sum(part) / total)}{end}"
        for name, part, end in (
            ("computing", compute, ","),
            ("waiting for other ranks", waiting, ","),
            ("moving data", moving, "."),
        )
    )
    where = f"All ranks together spent their time {shares}"
    if times.ranks == 1:
        return where.replace("All ranks together", "The only rank")
    return f"{_slowest(times, compute, waiting, hosts)} {where}"


def confusions(matrix: Matrix, count: int = 3) -> str:
    """Return the pairs of classes that are confused most often, as a sentence."""
    wrong = [
        (times, true, predicted)
        for true, row in enumerate(matrix.rows)
        for predicted, times in enumerate(row)
        if true != predicted and times > 0
    ]
    worst = sorted(wrong, key=lambda found: (-found[0], found[1:]))[:count]
    if not worst:
        return "No sample is in a wrong class."
    pairs = "; ".join(f"true {true}, predicted {said}: {times:,g}" for times, true, said in worst)
    return f"Confused most often: {pairs}."


def _slowest(
    times: TimeBreakdown, compute: list[float], waiting: list[float], hosts: Sequence[str]
) -> str:
    """Return a sentence about the rank that computed longest, by its share of its own time."""
    there = [sum(parts) for parts in zip(*times.totals, strict=True)]
    share = [c / t if t > 0 else 0.0 for c, t in zip(compute, there, strict=True)]
    rank = max(range(times.ranks), key=share.__getitem__)
    usual = median_low(share)
    if usual <= 0 or share[rank] < (1 + _STANDS_OUT) * usual:
        return (
            f"No rank stands out: the slowest, rank {rank}, computed "
            f"{_percent(share[rank])} of its time, the median rank {_percent(usual)}."
        )
    others = [
        waiting[other] / there[other]
        for other in range(times.ranks)
        if other != rank and there[other] > 0
    ]
    where = f" on {hosts[rank]}" if len(set(hosts)) > 1 and rank < len(hosts) else ""
    last = times.last_to_arrive[rank] / sum(times.last_to_arrive)
    return (
        f"Rank {rank}{where} is the slowest: it computed {_percent(share[rank])} of its time, "
        f"the median rank {_percent(usual)}. It came last {_percent(last)} of the time, and the "
        f"other ranks spent {_percent(sum(others) / len(others))} of theirs waiting."
    )


def _percent(share: float) -> str:
    # No line break before the sign.
    return f"{100 * share:.{1 if share < 0.1 else 0}f}\u00a0%"
