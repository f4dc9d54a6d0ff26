"""What the command and the ranks tell each other: tasks, strategies, results."""

from __future__ import annotations

import importlib.util
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

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
    """What the processes of a contender do."""

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
    """What one rank has measured."""

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


def write(path: Path, value: Task | RankResult) -> None:
    """Write a file for another process, atomically."""
    with replacing(path) as file:
        pickle.dump(value, file)


def read(path: Path) -> Any:
    """Read what another process of this comparison has written."""
    return pickle.loads(path.read_bytes())


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
