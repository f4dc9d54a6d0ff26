"""What a run leaves for programs to read: metrics.jsonl and summary.json."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from hvdtrain.train.files import publish, unfinished_file

__all__ = [
    "METRICS",
    "SUMMARY",
    "Metrics",
    "Score",
    "Seconds",
    "Summary",
    "Sums",
    "append_metrics",
    "drop_metrics_after",
    "write_summary",
]

METRICS = "metrics.jsonl"
SUMMARY = "summary.json"


@dataclass(frozen=True)
class Score:
    """Means over samples."""

    loss: float
    accuracy: float


@dataclass(frozen=True)
class Sums:
    """Over samples of all ranks: of their losses, of the hits, and how many samples they were."""

    loss: float = 0.0
    hits: int = 0
    samples: int = 0

    @classmethod
    def of(cls, sums: Sequence[float]) -> Self:
        """Take what frameworks add up, [losses, hits, samples]."""
        loss, hits, samples = sums
        return cls(float(loss), int(hits), int(samples))

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.loss + other.loss, self.hits + other.hits, self.samples + other.samples)

    @property
    def score(self) -> Score:
        """The means."""
        return Score(self.loss / self.samples, self.hits / self.samples)


@dataclass(frozen=True)
class Metrics:
    """One line of metrics.jsonl: one split ("train" or "test") after one epoch.

    Attributes:
        epoch: epochs done, from 1 on.
        step: optimizer steps done.
        lr: the learning rate of the last step.
        samples_per_second: of this split, over all ranks.
    """

    epoch: int
    step: int
    split: str
    loss: float
    accuracy: float
    lr: float
    samples_per_second: float


@dataclass(frozen=True)
class Seconds:
    """Where the time went on rank 0: communicate is how long training stood still for it."""

    total: float
    compute: float
    communicate: float


@dataclass(frozen=True)
class Summary:
    """The content of summary.json.

    Attributes:
        hosts: how many host names the ranks have.
        host_names: these names.
        epochs: epochs done, those before a resume included.
        final: loss and accuracy on the test samples.
        samples: training samples used in `epochs`.
        samples_per_second: samples / seconds.total.
        seconds: of all epochs, evaluation and checkpoints included.
        weights_sha256: by rank, the digest of the rank's own parameters and buffers.
    """

    world_size: int
    hosts: int
    host_names: list[str]
    engine: str
    framework: str
    global_batch_size: int
    base_lr: float
    scaled_lr: float
    epochs: int
    final: Score
    samples: int
    samples_per_second: float
    seconds: Seconds
    weights_sha256: list[str]


def append_metrics(directory: Path, lines: Iterable[Metrics]) -> None:
    """Add lines to metrics.jsonl, and bring them to the disk."""
    with open(directory / METRICS, "a", encoding="utf-8") as file:
        file.writelines(_json(asdict(line)) + "\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())


def drop_metrics_after(directory: Path, epoch: int) -> None:
    """Keep the lines of metrics.jsonl up to `epoch`; those of later epochs will come again."""
    path = directory / METRICS
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    kept = [line for line in lines if _epoch_of(line) <= epoch]
    with unfinished_file(directory) as file:
        file.writelines(f"{line}\n".encode() for line in kept)
        publish(file, path)


def write_summary(directory: Path, summary: Summary) -> None:
    """Write summary.json, replacing an older one."""
    with unfinished_file(directory) as file:
        file.write((_json(asdict(summary), indent=2) + "\n").encode())
        publish(file, directory / SUMMARY)


def _epoch_of(line: str) -> float:
    """Return the epoch of a line; a torn one, from a killed run, lies after all epochs."""
    try:
        return float(json.loads(line)["epoch"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _json(value: dict[str, Any], indent: int | None = None) -> str:
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: a loss that diverged becomes null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
