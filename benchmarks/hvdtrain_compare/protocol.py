"""What the command and the ranks tell each other: tasks, strategies, results."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdtrain.data.sampling import Indices
from hvdtrain.errors import UsageError
from hvdtrain.files import replacing
from hvdtrain.train.options import TrainOptions


@dataclass(frozen=True)
class Place:
    """The place of a process among those of its contender."""

    rank: int
    size: int


@dataclass(frozen=True)
class Task:
    """What the processes of a contender do; a file of JSON."""

    strategy: str
    variant: str
    options: Mapping[str, Any]
    ranks: int
    check_steps: int
    keeps_weights: bool
    folder: str
    shared: str

    @property
    def train_options(self) -> TrainOptions:
        """The options of the training."""
        folder = self.options.get("data_dir")
        return TrainOptions(**{**self.options, "data_dir": folder and Path(folder)})

    def write(self, path: Path) -> None:
        """Write the file."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Task:
        """Read the file."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


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


class Launch(Enum):
    """How the processes of a strategy are started."""

    MPI = "mpirun"
    PROCESSES = "processes with RANK, WORLD_SIZE and MASTER_ADDR, as torchrun starts them"
    ONE = "one process"


@dataclass(frozen=True)
class Need:
    """A package that a strategy needs."""

    module: str
    install: str

    def require(self) -> None:
        """Check that the module is installed, without importing it."""
        try:
            found = importlib.util.find_spec(self.module)
        except ModuleNotFoundError:  # of the package that it is part of
            found = None
        if found is None:
            package = self.module.partition(".")[0]
            raise UsageError(f"{package} is not installed: {self.install}")


TORCH = Need("torch", "pip install 'hvdtrain[torch]'")
KERAS = Need("keras", "pip install 'hvdtrain[keras]'")
TENSORFLOW = Need("tensorflow", "pip install 'hvdtrain[tensorflow]'")
JAX = Need("jax", "pip install jax")


@dataclass(frozen=True)
class Strategy:
    """A way to train on several processes."""

    name: str
    summary: str
    launch: Launch
    needs: tuple[Need, ...]
    code: str
    train: Callable[[Task, Place], RankResult]
    takes_variants: bool = False
    backend: str = ""
    helpers: tuple[str, ...] = ()

    @property
    def lines(self) -> int:
        """The number of lines that a user adds or changes; blank lines and comments are none."""
        lines = (line.strip() for line in self.code.splitlines())
        return sum(1 for line in lines if line and not line.startswith("#"))

    def processes(self, ranks: int) -> int:
        """Return the number of processes that train, for so many ranks."""
        return 1 if self.launch is Launch.ONE or self.helpers else ranks

    def roles(self, ranks: int) -> list[str]:
        """Return the role of each process in TF_CONFIG."""
        if not self.helpers:
            return ["worker"] * self.processes(ranks)
        return ["chief", *self.helpers, *["worker"] * ranks]
