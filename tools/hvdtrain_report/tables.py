"""What the page says: results of each run, settings side by side, and sentences about plots."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median_low

from hvdtrain.topology import shortened
from hvdtrain_report.curves import Matrix
from hvdtrain_report.lines import number
from hvdtrain_report.ranks import TimeBreakdown
from hvdtrain_report.run import RunFiles

_SPLITS = ("test", "train", "step")
_SPEED = ("lr", "samples_per_second")
_ABSENT = "-"
# What an MPI says of its build after its name and version.
_BANNER = re.compile(r"(?:, package: |\n).*", re.DOTALL)
# Longest text of a cell, and list of words that is shown whole: some have one for each rank.
_LONGEST, _MOST = 240, 8
# They have tables of their own.
_SHOWN = ("failures", "joins")


def facts(runs: Sequence[RunFiles]) -> dict[str, list[str]]:
    """Return one text per run for each label; labels without any value are left out."""
    results = [run.measured.last.get(final_split(run) or "", {}) for run in runs]
    rows: dict[str, list[str]] = {
        metric: ["" if metric not in last else _short(last[metric]) for last in results]
        for metric in dict.fromkeys(name for last in results for name in last)
        if metric not in _SPEED
    }
    rows["best"] = [_best(run) for run in runs]
    rows["samples/s"] = [_rate(run) for run in runs]
    rows["time"] = [_duration(_seconds(run)) for run in runs]
    rows["epochs"] = [_short(_epochs(run)) for run in runs]
    rows["ranks"] = [
        _text(_of(run, "world_size") or (run.ranks and run.ranks.ranks)) for run in runs
    ]
    for label, key in (
        ("hosts", "hosts"),
        ("global batch", "global_batch_size"),
        ("framework", "framework"),
        ("engine", "engine"),
        ("exchange", "exchange"),
        ("ended by", "ended"),
    ):
        rows[label] = [_text(_of(run, key)) for run in runs]
    rows["mean staleness"] = [_staleness(run) for run in runs]
    return {label: texts for label, texts in rows.items() if any(texts)}


def final_split(run: RunFiles) -> str | None:
    """Return the split whose last values count as the run's result."""
    known = run.measured.last
    return next((s for s in _SPLITS if s in known), next(iter(known), None))


def _best(run: RunFiles) -> str:
    """Return the best evaluation by the metric that decides, and when it was."""
    best = (run.summary or {}).get("best")
    if not isinstance(best, Mapping) or (value := number(best.get("value"))) is None:
        return ""
    return f"{best.get('name')} {_short(value)}, epoch {_short(number(best.get('epoch')) or 0.0)}"


def _rate(run: RunFiles) -> str:
    """Return the rate of the whole run; without a summary, that of the last training epoch."""
    known = [_of(run, "samples_per_second") or None]
    known += [run.measured.last.get(s, {}).get("samples_per_second") for s in ("train", "step")]
    rate = number(next((each for each in known if each is not None), None))
    return "" if rate is None or not math.isfinite(rate) else f"{rate:,.0f}"


def _seconds(run: RunFiles) -> float:
    known = (run.summary or {}).get("seconds")
    total = number(known.get("total")) if isinstance(known, Mapping) else None
    if total is not None and math.isfinite(total):
        return total
    ends = [curve.seconds[-1] for curve in run.measured.curves]
    return max((end for end in ends if math.isfinite(end)), default=math.nan)


def _staleness(run: RunFiles) -> str:
    """Return the mean staleness of a parameter server's gradients; "" without one."""
    counts = (run.summary or {}).get("parameter_server")
    mean = number(counts.get("mean_staleness")) if isinstance(counts, Mapping) else None
    return "" if mean is None else _short(mean)


def _epochs(run: RunFiles) -> float:
    return max((curve.epoch[-1] for curve in run.measured.curves), default=math.nan)


def _of(run: RunFiles, key: str) -> object:
    """Return a value of the summary, else of the environment or the options."""
    for found in (run.summary, run.environment, run.config):
        if found and not isinstance(found.get(key), dict | list | None):
            return found[key]
    return None


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return ""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _short(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "not finite"


def _text(value: object) -> str:
    return "" if value is None else str(value)


@dataclass(frozen=True)
class SettingRow:
    name: str
    texts: list[str]
    differs: bool


def side_by_side(
    settings: Sequence[Mapping[str, object] | None], mark: bool = True
) -> list[SettingRow]:
    """Return one row for each setting of any run."""
    flat = [dict(_flat("", found)) if found else {} for found in settings]
    # The dictionary keeps the order of first occurrence.
    names = {name: None for found in flat for name in found}
    # Nothing is known of a run without the file.
    known = [found for found in flat if found]
    return [
        SettingRow(
            name,
            [_shortened(found.get(name, _ABSENT)) for found in flat],
            mark and len({found.get(name) for found in known}) > 1,
        )
        for name in names
    ]


def _flat(prefix: str, found: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    for key, value in found.items():
        name = f"{prefix}{key}"
        if name in _SHOWN:
            continue
        if isinstance(value, Mapping) and value:
            yield from _flat(f"{name}.", value)
        else:
            yield name, _json_text(value)


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _json_text(value: object) -> str:
    if isinstance(value, str):
        return _BANNER.sub("", value)
    if isinstance(value, list) and len(value) > _MOST and all(isinstance(e, str) for e in value):
        runs = [(name, len(list(run))) for name, run in groupby(value)]
        return shortened([f"{name} (x{n})" if n > 1 else name for name, n in runs], ", ", "")
    return _ABSENT if value is None else json.dumps(value, ensure_ascii=False, default=str)


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
    usual, other = median_low(share), "the other" if times.ranks == 2 else "the median rank"
    if usual <= 0 or share[rank] < (1 + _STANDS_OUT) * usual:
        return (
            f"No rank stands out: the slowest, rank {rank}, computed "
            f"{_percent(share[rank])} of its time, {other} {_percent(usual)}."
        )
    others = [
        w / t for n, (w, t) in enumerate(zip(waiting, there, strict=True)) if n != rank and t > 0
    ]
    where = f" on {hosts[rank]}" if len(set(hosts)) > 1 and rank < len(hosts) else ""
    last = times.last_to_arrive[rank] / sum(times.last_to_arrive)
    return (
        f"Rank {rank}{where} is the slowest: it computed {_percent(share[rank])} of its time, "
        f"{other} {_percent(usual)}. It came last {_percent(last)} of the time, and the "
        f"other ranks spent {_percent(sum(others) / len(others))} of theirs waiting."
    )


def _percent(share: float) -> str:
    # No line break before the sign.
    return f"{100 * share:.{1 if share < 0.1 else 0}f}\u00a0%"
