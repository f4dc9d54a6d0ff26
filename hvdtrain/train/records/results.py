"""Results for programs to read: metrics.jsonl, steps.jsonl, ranks.jsonl and summary.json."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hvdtrain.files import replacing
from hvdtrain.train.metrics.totals import Values


@dataclass(frozen=True)
class RanksLost:
    """Ranks that ended while the others continued.

    Attributes:
        seconds: time from the notice until the others were ready for the next step.
    """

    step: int
    epoch: float
    trained_seconds: float
    lost: Sequence[int]
    ranks: int
    seconds: float
    global_batch_size: int
    scaled_lr: float
    left: bool = False
    again: int = 0


@dataclass(frozen=True)
class RanksJoined:
    """Ranks that joined the others.

    Attributes:
        seconds: time from the last step of the others until all were ready for the next one.
    """

    step: int
    epoch: float
    trained_seconds: float
    joined: Sequence[int]
    ranks: int
    seconds: float
    start_seconds: float
    global_batch_size: int
    scaled_lr: float


METRICS = "metrics.jsonl"
STEPS = "steps.jsonl"
RANKS = "ranks.jsonl"
SUMMARY = "summary.json"


@dataclass(frozen=True)
class MetricsRecord:
    """One line of metrics.jsonl or steps.jsonl."""

    epoch: float
    step: int
    split: str
    values: Values
    lr: float
    samples_per_second: float
    seconds: float

    def line(self) -> dict[str, Any]:
        """Return the line as a dictionary for JSON."""
        epoch = int(self.epoch) if self.epoch == int(self.epoch) else round(self.epoch, 6)
        return {
            "epoch": epoch,
            "step": self.step,
            "split": self.split,
            **self.values,
            "lr": self.lr,
            "samples_per_second": self.samples_per_second,
            "seconds": self.seconds,
        }


@dataclass(frozen=True)
class Seconds:
    """Times on rank 0; `communicate` is how long training waited for communication."""

    total: float
    compute: float
    communicate: float


@dataclass(frozen=True)
class Summary:
    """The content of summary.json.

    Attributes:
        samples_per_second: samples / seconds.total.
        seconds: times of all epochs, including evaluation and checkpoints.
    """

    world_size: int
    hosts: int
    host_names: list[str]
    engine: str
    framework: str
    exchange: str
    global_batch_size: int
    base_lr: float
    scaled_lr: float
    epochs: int
    final: Values
    samples: int
    samples_per_second: float
    seconds: Seconds
    weights_sha256: list[str]
    steps: int
    best: dict[str, Any] | None
    ended: str
    parameter_server: dict[str, Any] | None = None
    failures: Sequence[RanksLost] = ()
    joins: Sequence[RanksJoined] = ()


def append_lines(
    directory: Path, name: str, lines: Iterable[Mapping[str, Any]], sync: bool = True
) -> None:
    """Append lines to a JSON lines file, all or none."""
    data = "".join(json_text(line) + "\n" for line in lines).encode()
    with open(directory / name, "ab", buffering=0) as file:
        before = file.tell()
        try:
            if file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if sync:
                os.fsync(file.fileno())
        except OSError:
            file.truncate(before)
            raise


def drop_lines_after(directory: Path, step: int) -> None:
    """Remove the lines of steps after `step` from all such files; the run writes them again."""
    for name in (METRICS, STEPS, RANKS):
        path = directory / name
        if not path.exists():
            continue
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        kept = [line for line in lines if _step_of(line) <= step]
        with replacing(path) as file:
            file.writelines(f"{line}\n".encode() for line in kept)


def write_summary(directory: Path, summary: Summary) -> None:
    """Write summary.json, replacing an older one."""
    with replacing(directory / SUMMARY) as file:
        file.write((json_text(asdict(summary), indent=2) + "\n").encode())


def _step_of(line: str) -> float:
    """Return the step of a line; infinity for a torn line of a killed run."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def json_text(value: Mapping[str, Any], indent: int | None = None) -> str:
    """Return JSON, with null for numbers that are not finite."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by None."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


MARKER = "requeue"


def leave_marker(directory: Path, text: str) -> None:
    """Write the `requeue` file, after the checkpoint that it promises (rank 0 only)."""
    (directory / MARKER).write_text(f"{text}\n", encoding="utf-8")


def remove_marker(directory: Path) -> None:
    """Remove the `requeue` file of an earlier start (rank 0 only)."""
    (directory / MARKER).unlink(missing_ok=True)
