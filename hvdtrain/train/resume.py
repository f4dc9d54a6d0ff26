"""Resuming a run from a checkpoint: it is found before the model is built, and loaded after."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from hvdtrain.collective import collective
from hvdtrain.core import context
from hvdtrain.core.gradients.bucket_size import BucketSize
from hvdtrain.core.membership.world import Context
from hvdtrain.errors import UsageError
from hvdtrain.train.checkpoint.directory import (
    LoadedCheckpoint,
    checkpoint_files,
    mark_best,
    newest_good,
)
from hvdtrain.train.checkpoint.file import load_checkpoint, position_of
from hvdtrain.train.checkpoint.tensor_file import TensorLibrary
from hvdtrain.train.loop.exchange_record import ExchangeRecord
from hvdtrain.train.loop.protocol import Framework, TrainingLoop, TrainingState
from hvdtrain.train.options import RUNS, TrainOptions
from hvdtrain.train.options.config_file import counted
from hvdtrain.train.progress import Progress, restore_progress
from hvdtrain.train.records import (
    METRICS,
    SUMMARY,
    drop_lines_after,
    new_directory,
    prepare_directory,
    remove_marker,
    usage_errors,
)


@dataclass(frozen=True)
class WorldSettings:
    """Settings that decide how the sums of a run are rounded, as checkpoints hold them."""

    size: int = 0
    threads: tuple[int | None, ...] = ()
    bucket_bytes: int | None = None
    plan: Any = None

    def validated(self) -> Self:
        """Return the settings."""
        if len(self.threads) != self.size:
            threads, ranks = counted(len(self.threads), "rank"), counted(self.size, "rank")
            raise ValueError(f"it has threads of {threads}, but {ranks}")
        return self

    def prepare(self, world: Context, framework: Framework) -> None:
        """Apply the number of threads and the bucket size, before the optimizer is made."""
        if self.size != world.topology.size:
            return
        if self.bucket_bytes is not None:
            size = BucketSize(self.bucket_bytes, "as in the checkpoint")
            world.bucket_sizes[world.world] = size
        threads = self.threads[world.topology.rank]
        if threads is not None:
            framework.use_threads(threads)

    @collective
    def apply(self, loop: TrainingLoop, world: Context) -> None:
        """Apply the order of gradients."""
        if self.size == world.topology.size and self.plan is not None:
            loop.use_bucket_plan(self.plan)


def world_settings(
    world: Context, loop: TrainingLoop, threads: tuple[int | None, ...]
) -> dict[str, Any]:
    """Return the current settings as a checkpoint holds them (rank 0 only)."""
    size = world.bucket_sizes.get(world.world)
    return {
        "size": world.topology.size,
        "bucket_bytes": None if size is None else size.nbytes,
        "plan": loop.bucket_plan(),
        "threads": threads,
    }


class StateLoader(Protocol):
    """Brings back the state that a run continues from, in two steps."""

    def find(self, library: TensorLibrary) -> WorldSettings:
        """Find the state, before the model is built (rank 0 only)."""

    def begin_run(self, epoch_samples: int, state: TrainingState) -> RunStart:
        """Load the state, and prepare the directory (rank 0 only)."""

    @collective
    def restore_exchange(self, loop: TrainingLoop, start: RunStart) -> None:
        """Restore the state of the exchange."""


class CheckpointLoader:
    """Finds and loads the checkpoint of a run on rank 0, in two steps."""

    def __init__(self, options: TrainOptions) -> None:
        self._options = options
        self._found = LoadedCheckpoint()
        self._exchange: ExchangeRecord | None = None

    def find(self, library: TensorLibrary) -> WorldSettings:
        """Find the checkpoint that the options ask for; warn about damaged ones (rank 0 only)."""
        self._found = find_checkpoint(self._options, library)
        for warning in self._found.bad:
            print(f"hvdtrain: {warning}", file=sys.stderr, flush=True)
        try:
            return WorldSettings(**self._found.content.get("world", {})).validated()
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"checkpoint {self._found.path} lacks what is needed: {error}"
            ) from error

    def begin_run(self, epoch_samples: int, state: TrainingState) -> RunStart:
        """Load the checkpoint that was found, and prepare the directory (rank 0 only)."""
        start = begin_run(self._options, epoch_samples, state, self._found)
        self._exchange = self._found.content.get("exchange")
        self._found = LoadedCheckpoint()  # its tensors take as much memory as the model
        return start

    @collective
    def restore_exchange(self, loop: TrainingLoop, start: RunStart) -> None:
        """Restore the state of the exchange of a resumed run; warn about what is lost."""
        restore_or_warn(loop, start, self._exchange)
        self._exchange = None


@collective
def restore_or_warn(loop: TrainingLoop, start: RunStart, record: ExchangeRecord | None) -> None:
    """Restore the state of the exchange of a resumed run; warn about what is lost."""
    lost = loop.restore_exchange(record) if start.resumed else ""
    if lost and context.current().topology.rank == 0:
        print(f"hvdtrain: {lost}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class RunStart:
    """The starting point of a run."""

    directory: Path
    progress: Progress
    origin: str = ""
    resumed: bool = False
    pauses: bool = False


def find_checkpoint(options: TrainOptions, library: TensorLibrary) -> LoadedCheckpoint:
    """Read the checkpoint to resume from, if the options ask for one (rank 0 only)."""
    with usage_errors(options.out or RUNS):
        return _find(options, library)


def _find(options: TrainOptions, library: TensorLibrary) -> LoadedCheckpoint:
    if options.resume == "never":
        return LoadedCheckpoint()
    if options.resume != "auto" or options.out is None:
        path = Path(options.resume)
        return LoadedCheckpoint(path, load_checkpoint(path, library))
    found = newest_good(options.out, library)
    if found.path is None and found.bad:
        raise UsageError(
            f"no checkpoint in {options.out} can be used ({'; '.join(found.bad)}): start again "
            "with another --out"
        )
    return found


def begin_run(
    options: TrainOptions, epoch_samples: int, state: TrainingState, found: LoadedCheckpoint
) -> RunStart:
    """Load a checkpoint, and prepare the directory of the run (rank 0 only)."""
    with usage_errors(options.out or RUNS):
        return _begin(options, epoch_samples, state, found)


def _begin(
    options: TrainOptions, epoch_samples: int, state: TrainingState, found: LoadedCheckpoint
) -> RunStart:
    _refuse_to_mix(options, found.path)
    progress, origin = Progress(), ""
    if found.path is not None:
        progress = restore_progress(found.path, found.content, options, epoch_samples, state)
        origin = f"{found.path}, {progress.text} done"
    elif options.resume == "auto":
        origin = f"no checkpoint in {options.out}: starting with epoch 1"
    if options.out is None:
        directory = new_directory(RUNS, Path(options.recipe.partition(":")[0]).stem)
        return RunStart(directory, progress, origin, found.path is not None)
    prepare_directory(options.out)
    remove_marker(options.out)
    drop_lines_after(options.out, progress.step)
    _mark_if_best(options.out, found.path, progress)
    return RunStart(options.out, progress, origin, found.path is not None)


def _mark_if_best(directory: Path, resumed: Path | None, progress: Progress) -> None:
    """Mark the best checkpoint for a run that was killed after writing it and before marking it."""
    best = progress.best
    inside = resumed is not None and resumed.resolve().parent == directory.resolve()
    if resumed is not None and inside and best is not None and best.step == progress.step:
        mark_best(resumed)


def _refuse_to_mix(options: TrainOptions, resumed: Path | None) -> None:
    """Refuse a directory whose results this run would overwrite or mix with its own."""
    if options.out is None or options.resume == "auto":
        return
    files = checkpoint_files(options.out)
    others = [name for name in (METRICS, SUMMARY) if (options.out / name).exists()]
    if not files and not others:
        return
    if resumed is None or resumed.resolve().parent != options.out.resolve():
        raise UsageError(
            f"{options.out} holds the results of another run: resume it with --resume auto, or "
            "name another directory with --out"
        )
    if files and position_of(files[0]) > position_of(resumed):
        raise UsageError(
            f"{options.out} holds a later checkpoint, {files[0].name}: remove it, or name another "
            "directory with --out"
        )
