"""Reader of the directory of a run, with the ranks that it has lost and gained."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.topology import format_ranks
from hvdtrain_report.curves import RunMeasurements, read_curves
from hvdtrain_report.lines import JsonObject, number, read_object
from hvdtrain_report.ranks import TimeBreakdown, read_ranks

COLUMNS = (
    *("step", "ranks lost", "reason", "ranks left", "continued after"),
    *("samples per step", "learning rate"),
)
JOIN_COLUMNS = (
    *("step", "ranks joined", "ranks then", "started in", "others waited"),
    *("samples per step", "learning rate"),
)


@dataclass(frozen=True)
class Change:
    """Ranks that ended or joined while the others continued; what is unknown is NaN."""

    step: float
    epoch: float
    seconds: float
    texts: tuple[str, ...]


def read_changes(summary: JsonObject | None, name: str) -> list[Change]:
    """Return the "failures" or "joins" of a summary; runs of earlier versions have none."""
    found = (summary or {}).get(name)
    return [
        Change(
            _number(entry, "step"),
            _number(entry, "epoch"),
            _number(entry, "trained_seconds"),
            (
                _text(entry, "step", ".0f"),
                *(_failure(entry) if name == "failures" else _join(entry)),
                _text(entry, "global_batch_size", ".0f"),
                _text(entry, "scaled_lr", ".4g"),
            ),
        )
        for entry in (found if isinstance(found, list) else [])
        if isinstance(entry, Mapping)
    ]


def _failure(entry: Mapping[str, object]) -> tuple[str, ...]:
    return (
        _ranks(entry, "lost"),
        "asked to leave" if entry.get("left") is True else "ended",
        _text(entry, "ranks", ".0f"),
        _seconds(entry, "seconds"),
    )


def _join(entry: Mapping[str, object]) -> tuple[str, ...]:
    return (
        _ranks(entry, "joined"),
        _text(entry, "ranks", ".0f"),
        _seconds(entry, "start_seconds"),
        _seconds(entry, "seconds"),
    )


def _number(entry: Mapping[str, object], name: str) -> float:
    found = number(entry.get(name))
    return math.nan if found is None else found


def _text(entry: Mapping[str, object], name: str, form: str) -> str:
    value = _number(entry, name)
    return format(value, form) if math.isfinite(value) else ""


def _seconds(entry: Mapping[str, object], name: str) -> str:
    text = _text(entry, name, ".2f")
    return f"{text} s" if text else ""


def _ranks(entry: Mapping[str, object], name: str) -> str:
    found = entry.get(name)
    ranks = [rank for rank in found if isinstance(rank, int)] if isinstance(found, list) else []
    return format_ranks(ranks).partition(" ")[2] if ranks else ""


# Named here and not imported from the training loop: the page reads runs of other versions.
_METRICS = ("metrics.jsonl", "steps.jsonl")
_RANKS = "ranks.jsonl"
_CONFIG = "config.yaml"
_ENVIRONMENT = "environment.json"
_SUMMARY = "summary.json"
_LOG, _LOG_LINES, _LOG_BYTES = "log.txt", 100, 1 << 16


@dataclass(frozen=True)
class RunFiles:
    path: Path
    measured: RunMeasurements
    ranks: TimeBreakdown | None
    config: JsonObject | None
    environment: JsonObject | None
    summary: JsonObject | None
    notes: list[str]
    failures: list[Change]
    joins: list[Change]
    log: str

    @property
    def hosts(self) -> list[str]:
        """Host of each rank, by rank; empty if unknown."""
        found = (self.environment or {}).get("hosts")
        return [str(host) for host in found] if isinstance(found, list) else []


def read_run(path: Path) -> RunFiles:
    metrics = [path / name for name in _METRICS if (path / name).exists()]
    if not metrics:
        _refuse(path)
    measured = read_curves(metrics)
    ranks = read_ranks(path / _RANKS) if (path / _RANKS).exists() else None
    config = _read_yaml(path / _CONFIG) if (path / _CONFIG).exists() else None
    environment, summary = (
        read_object(path / name) if (path / name).exists() else None
        for name in (_ENVIRONMENT, _SUMMARY)
    )
    notes = [
        f"{name} is missing: {lost}."
        for found, name, lost in (
            (summary, _SUMMARY, "the run has not ended, or was stopped"),
            (ranks, _RANKS, "the page cannot say where the time went"),
            (config, _CONFIG, "the options are not known"),
            (environment, _ENVIRONMENT, "versions and hosts are not known"),
        )
        if found is None
    ]
    if not measured.curves:
        notes.append("metrics.jsonl has no number yet: there is no curve.")
    if ranks is not None and not ranks.intervals:
        notes.append(f"{_RANKS} has no line yet: the page cannot say where the time went.")
        ranks = None
    notes += measured.notes + (ranks.notes if ranks else [])
    changes = read_changes(summary, "failures"), read_changes(summary, "joins")
    log = _last_lines(path / _LOG) if (path / _LOG).is_file() else ""
    return RunFiles(path, measured, ranks, config, environment, summary, notes, *changes, log)


def _last_lines(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - _LOG_BYTES))
            text = file.read().decode(errors="replace")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    return "\n".join(text.splitlines()[-_LOG_LINES:])


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """Return a distinct name for each run: its directory, with as many parents as needed."""
    full = [path.absolute().parts for path in paths]
    longest = max(len(parts) for parts in full)
    for count in range(1, longest + 1):
        names = ["/".join(parts[-count:]) for parts in full]
        if len(set(names)) == len(set(full)):
            break
    seen: dict[str, int] = {}
    for place, name in enumerate(names):
        seen[name] = seen.get(name, 0) + 1
        if seen[name] > 1:
            names[place] = f"{name} ({seen[name]})"
    # A name that is not UTF-8 could not be written.
    return [os.fsencode(name).decode(errors="replace") for name in names]


def _refuse(path: Path) -> None:
    if not path.exists():
        raise UsageError(f"{path}: there is no such directory")
    if not path.is_dir():
        raise UsageError(f"{path} is a file: name the directory of a run (train's --out)")
    if (path / _CONFIG).exists():
        raise UsageError(f"{path} has no metrics yet: its first epoch has not ended")
    raise UsageError(f"{path} is not a run: it has no metrics.jsonl, which train writes to --out")


def _read_yaml(path: Path) -> JsonObject:
    try:
        import yaml
    except ImportError as error:
        raise UsageError(
            "report needs PyYAML to read config.yaml: pip install 'hvdtrain[report]'"
        ) from error
    try:
        found = yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not YAML: the file is damaged") from error
    if not isinstance(found, dict):
        raise UsageError(f"{path}: these are not options: the file is damaged")
    return found
