"""What the command and the ranks tell each other: tasks, strategies, results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdtrain.data.sampling import Indices
from hvdtrain.errors import UsageError
from hvdtrain.files import replacing
from hvdtrain.train.options import TrainOptions


@dataclass(frozen=True)
class ProcessPlace:
    rank: int
    size: int


@dataclass(frozen=True)
class ContenderTask:
    strategy: str
    variant: str
    options: TrainOptions
    ranks: int
    check_steps: int
    keeps_weights: bool
    folder: Path  # of this turn
    shared: Path  # of all turns


Weights = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class RankResult:
    library: str
    samples: int
    test_samples: int
    threads: int | None
    step_seconds: Sequence[float]
    epoch_seconds: Sequence[float]
    trained: Sequence[Indices]  # in each epoch
    evaluated: Indices
    scores: Mapping[str, tuple[float, float]]
    checked_after: int
    peak_memory_bytes: int
    socket_bytes_per_step: float | None  # of all processes; None where that is unknown
    notes: Sequence[str] = ()
    checked_weights: Weights = field(default_factory=dict)
    final_weights: Weights = field(default_factory=dict)


def write_task(path: Path, task: ContenderTask) -> None:
    """Write a task for another process, whose Python may be of another version."""
    path.write_text(json.dumps(asdict(task), default=str), encoding="utf-8")


def read_task(path: Path) -> ContenderTask:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    options = found["options"]
    options |= {name: options[name] and Path(options[name]) for name in ("data_dir", "out")}
    found |= {name: Path(found[name]) for name in ("folder", "shared")}
    return ContenderTask(**{**found, "options": TrainOptions(**options)})


# No argument of a recipe has that name.
_ARRAY, _FACTS = "/array", "facts"


def write_result(path: Path, result: RankResult) -> None:
    """Write what a rank has measured, atomically: JSON that names arrays beside it."""
    arrays: dict[str, Any] = {}

    def plain(part: object) -> object:
        arrays[f"{len(arrays)}"] = np.asarray(part)
        return {_ARRAY: f"{len(arrays) - 1}"}

    facts = json.dumps(vars(result), default=plain)
    with replacing(path) as file:
        np.savez(file, **{**arrays, _FACTS: np.array(facts)})


def read_result(path: Path) -> RankResult:
    with np.load(path, allow_pickle=False) as arrays:
        facts: dict[str, Any] = json.loads(
            str(arrays[_FACTS]),
            object_hook=lambda part: arrays[part[_ARRAY]] if part.keys() == {_ARRAY} else part,
        )
    return RankResult(**facts)


def result_file(folder: Path, rank: int) -> Path:
    return folder / f"rank.{rank}.npz"


def error_file(folder: Path, rank: int) -> Path:
    return folder / f"rank.{rank}.error"


def write_error(folder: Path, rank: int, error: Exception) -> None:
    """Write what has ended a rank, in one line."""
    text = " ".join(str(error).split())
    name = type(error).__name__
    known = isinstance(error, UsageError) and text
    line = text if known else f"{name}: {text}" if text else name
    error_file(folder, rank).write_text(line, encoding="utf-8", errors="replace")
