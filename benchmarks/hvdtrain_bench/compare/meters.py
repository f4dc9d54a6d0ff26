"""What a process is told and tells: tasks, time, memory, bytes sent, and which samples it used."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hvdtrain.data.sampling import (
    EvaluationSampler,
    Indices,
    global_batch,
    rank_slice,
    steps_per_epoch,
)
from hvdtrain.errors import UsageError
from hvdtrain.files import replacing
from hvdtrain.train.options import TrainOptions
from hvdtrain_bench.harness.network import sent_bytes


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


def peak_memory_bytes() -> int:
    """Return the most memory that this process has had; getrusage() includes its parent's."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    found = re.search(r"^VmHWM:\s*(\d+) kB", text, re.MULTILINE)
    return 1024 * int(found[1]) if found else 0


class StepMeter:
    """Times steps, keeps the weights after some of them, and counts what all processes send.

    The kernel counts bytes for the loopback interface as a whole: what other programs send is in
    it. Memory that processes share is not.
    """

    def __init__(self, check_after: int) -> None:
        self.seconds: list[float] = []
        self._epochs: list[float] = []
        self._trained: list[Indices] = []
        self._checked: Weights = {}
        self._sent = self._sent_before = 0
        self._check_after, self._started, self._first = check_after, 0.0, 0

    def begin(self) -> None:
        self._started = time.perf_counter()

    def end_step(self, weights: Callable[[], Weights]) -> None:
        """End a step, and begin the next."""
        self.seconds.append(time.perf_counter() - self._started)
        if len(self.seconds) == 1:  # it opens connections
            self._sent_before = sent_bytes(loopback=True)
        if len(self.seconds) == self._check_after:
            self.stop()
            self._checked = weights()
            self._sent_before = sent_bytes(loopback=True)
        self._started = time.perf_counter()

    def end_epoch(self, shares: Sequence[Indices]) -> None:
        """End an epoch, in which this process had these samples in each step."""
        self._epochs.append(sum(self.seconds[self._first :]))
        self._first = len(self.seconds)
        self._trained.append(np.concatenate(shares))

    def stop(self) -> None:
        """Add the bytes since the last time."""
        self._sent += sent_bytes(loopback=True) - self._sent_before

    def result(
        self, task: ContenderTask, place: ProcessPlace, final: Callable[[], Weights], **others: Any
    ) -> RankResult:
        keeps, steps = task.keeps_weights and place.rank == 0, len(self.seconds) - 1
        return RankResult(
            step_seconds=self.seconds,
            epoch_seconds=self._epochs,
            trained=self._trained,
            checked_after=self._check_after,
            peak_memory_bytes=peak_memory_bytes(),
            socket_bytes_per_step=self._sent / steps if steps else None,
            checked_weights=self._checked if keeps else {},
            final_weights=final() if keeps else {},
            **others,
        )


EVALUATED_TOGETHER = 128


class Division(Protocol):
    def train_shares(self, order: Indices) -> list[Indices]:
        """Return the samples of this process for each step of an epoch."""

    def test_share(self, samples: int) -> Indices:
        """Return the test samples of this process."""


class ExactDivision:
    """Each sample once: hvdtrain's division, and that of a single process."""

    def __init__(self, place: ProcessPlace, batch: int) -> None:
        self._place, self._batch = place, batch

    def train_shares(self, order: Indices) -> list[Indices]:
        steps = range(steps_per_epoch(len(order), self._batch))
        batches = (global_batch(order, step, self._batch) for step in steps)
        place = self._place
        return [batch[rank_slice(len(batch), place.rank, place.size)] for batch in batches]

    def test_share(self, samples: int) -> Indices:
        return EvaluationSampler(samples, self._place.rank, self._place.size).indices()


class ShardedDivision(ExactDivision):
    """The batches of tf.data's shard(), as many as all processes can fill."""

    def train_shares(self, order: Indices) -> list[Indices]:
        own, each = order[self._place.rank :: self._place.size], self._batch // self._place.size
        steps = range(len(order) // self._batch)
        return [own[step * each : (step + 1) * each] for step in steps]


class PaddedDivision(ExactDivision):
    """DistributedSampler: samples are repeated until all processes have the same number.

    It divides places in the order of the epoch, so that each step of all processes together has the
    samples that one process would take.
    """

    def train_shares(self, order: Indices) -> list[Indices]:
        own = order[self.test_share(len(order))]
        length = self._batch // self._place.size
        return [own[start : start + length] for start in range(0, len(own), length)]

    def test_share(self, samples: int) -> Indices:
        from torch.utils.data.distributed import DistributedSampler

        sampler: Any = DistributedSampler(
            range(samples),  # type: ignore[arg-type]
            num_replicas=self._place.size,
            rank=self._place.rank,
            shuffle=False,
        )
        return np.fromiter(sampler, np.int64)
