"""Results for programs to read: metrics.jsonl, steps.jsonl, ranks.jsonl and summary.json."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hvdtrain.train.metrics.totals import Values
from hvdtrain.train.records.files import publish, unfinished_file

__all__ = [
    "MARKER",
    "METRICS",
    "RANKS",
    "STEPS",
    "SUMMARY",
    "MetricsRecord",
    "Seconds",
    "Summary",
    "append_lines",
    "drop_lines_after",
    "leave_marker",
    "remove_marker",
    "write_summary",
]

METRICS = "metrics.jsonl"
STEPS = "steps.jsonl"
RANKS = "ranks.jsonl"
SUMMARY = "summary.json"


@dataclass(frozen=True)
class MetricsRecord:
    """One line of metrics.jsonl or steps.jsonl.

    Attributes:
        epoch: epochs done, from 1 on where they are whole.
        step: optimizer steps done.
        split: "train" or "test"; "step" in steps.jsonl.
        values: the mean loss and the metrics.
        lr: the learning rate of the last step.
        samples_per_second: of this split, over all ranks.
        seconds: of training since the very first start.
    """

    epoch: float
    step: int
    split: str
    values: Values
    lr: float
    samples_per_second: float
    seconds: float

    def line(self) -> dict[str, Any]:
        """Return what is written."""
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
        final: loss and metrics on the test samples; empty where there are none.
        samples: training samples used in `epochs`.
        samples_per_second: samples / seconds.total.
        seconds: of all epochs, evaluation and checkpoints included.
        weights_sha256: by rank, the digest of the rank's own parameters and buffers.
        steps: optimizer steps done.
        best: the metric that decides, its best value, and the epoch and step where it was.
        ended: "epochs", or "early stop".
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
    final: Values
    samples: int
    samples_per_second: float
    seconds: Seconds
    weights_sha256: list[str]
    steps: int
    best: dict[str, Any] | None
    ended: str


def append_lines(
    directory: Path, name: str, lines: Iterable[Mapping[str, Any]], sync: bool = True
) -> None:
    """Add lines to a file of JSON lines, all or none; `sync` brings them to the disk.

    Raises:
        OSError: they cannot be written.
    """
    data = "".join(_json(line) + "\n" for line in lines).encode()
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
    """Keep the lines up to `step` in all such files; those of later steps will come again."""
    for name in (METRICS, STEPS, RANKS):
        path = directory / name
        if not path.exists():
            continue
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        kept = [line for line in lines if _step_of(line) <= step]
        with unfinished_file(directory) as file:
            file.writelines(f"{line}\n".encode() for line in kept)
            publish(file, path)


def write_summary(directory: Path, summary: Summary) -> None:
    """Write summary.json, replacing an older one."""
    with unfinished_file(directory) as file:
        file.write((_json(asdict(summary), indent=2) + "\n").encode())
        publish(file, directory / SUMMARY)


def _step_of(line: str) -> float:
    """Return the step of a line; a torn one, from a killed run, lies after all steps."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _json(value: Mapping[str, Any], indent: int | None = None) -> str:
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: a loss that diverged becomes null."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


MARKER = "requeue"


def leave_marker(directory: Path, text: str) -> None:
    """Write the file, after the checkpoint that it promises (rank 0 only)."""
    (directory / MARKER).write_text(f"{text}\n", encoding="utf-8")


def remove_marker(directory: Path) -> None:
    """Remove the file of an earlier start (rank 0 only)."""
    (directory / MARKER).unlink(missing_ok=True)
