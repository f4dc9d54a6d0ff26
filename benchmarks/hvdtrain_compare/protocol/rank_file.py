"""What a rank of a contender has measured: one file for each rank."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdtrain.data.sampling import Indices
from hvdtrain.errors import UsageError
from hvdtrain.files import replacing

Weights = Mapping[str, npt.NDArray[Any]]
_FACTS = "facts"
# Attributes that are arrays; the others are facts.
_LISTS, _WEIGHTS = ("trained",), ("checked_weights", "final_weights")
_ARRAYS = ("step_seconds", "epoch_seconds", "evaluated")


@dataclass(frozen=True)
class RankResult:
    """What one rank has measured.

    Attributes:
        socket_bytes_per_step: bytes that all processes have sent through sockets in a step; None
            where that is unknown.
    """

    library: str
    samples: int
    test_samples: int
    threads: int | None
    step_seconds: npt.NDArray[np.float64]
    epoch_seconds: npt.NDArray[np.float64]
    trained: list[Indices]
    evaluated: Indices
    scores: Mapping[str, tuple[float, float]]
    checked_after: int
    peak_memory_bytes: int
    socket_bytes_per_step: float | None
    notes: list[str] = field(default_factory=list)
    checked_weights: Weights = field(default_factory=dict)
    final_weights: Weights = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write the file atomically."""
        arrays: dict[str, Any] = {name: getattr(self, name) for name in _ARRAYS}
        for name in _LISTS:
            arrays |= {f"{name}/{n}": part for n, part in enumerate(getattr(self, name))}
        for name in _WEIGHTS:
            arrays |= {f"{name}/{key}": array for key, array in getattr(self, name).items()}
        named = {*_ARRAYS, *_LISTS, *_WEIGHTS}
        facts = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in named}
        with replacing(path) as file:
            np.savez(file, **{_FACTS: np.array(json.dumps(facts)), **arrays})

    @classmethod
    def read(cls, path: Path) -> RankResult:
        """Read the file."""
        found: dict[str, Any] = {name: {} for name in (*_LISTS, *_WEIGHTS)}
        with np.load(path, allow_pickle=False) as file:
            for key in file.files:
                name, _, rest = key.partition("/")
                if rest:
                    found[name][rest] = file[key]
                else:
                    found[name] = file[key]
        found |= json.loads(str(found.pop(_FACTS)))
        for name in _LISTS:
            parts = found[name]
            found[name] = [parts[str(number)] for number in range(len(parts))]
        return cls(**found)


def result_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank's result."""
    return folder / f"rank.{rank}.npz"


def error_file(folder: Path, rank: int) -> Path:
    """Return the file with the error of a rank."""
    return folder / f"rank.{rank}.error"


def write_error(folder: Path, rank: int, error: Exception) -> None:
    """Write what has ended a rank, in one line."""
    text = " ".join(str(error).split())
    name = type(error).__name__
    known = isinstance(error, UsageError) and text
    line = text if known else f"{name}: {text}" if text else name
    error_file(folder, rank).write_text(line, encoding="utf-8", errors="replace")
