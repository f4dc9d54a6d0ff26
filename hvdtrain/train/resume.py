"""Resuming from a checkpoint: found before the model is built, loaded after."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from hvdtrain.core.context import Context
from hvdtrain.core.gradients.bucket_size import BucketSize
from hvdtrain.errors import UsageError
from hvdtrain.train.checkpoint.directory import (
    LoadedCheckpoint,
    checkpoint_files,
    mark_best,
    newest_good,
)
from hvdtrain.train.checkpoint.file import load_checkpoint
from hvdtrain.train.checkpoint.names import position_of
from hvdtrain.train.checkpoint.tensor_file import TensorLibrary
from hvdtrain.train.loop.protocol import Framework, TrainingLoop, TrainingState
from hvdtrain.train.options import RUNS, TrainOptions
from hvdtrain.train.progress import Progress, restore_progress
from hvdtrain.train.records.files import new_directory, prepare_directory, usage_errors
from hvdtrain.train.records.results import METRICS, SUMMARY, drop_lines_after, remove_marker

__all__ = [
    "CheckpointLoader",
    "LoadedCheckpoint",
    "RunStart",
    "WorldSettings",
    "begin_run",
    "find_checkpoint",
    "world_settings",
]


@dataclass(frozen=True)
class WorldSettings:
    """What decides how the sums of a run round; a checkpoint holds it.

    Attributes:
        size: how many ranks there were.
        bucket_bytes: the limit of a bucket; None: not known.
        plan: in which order gradients were reduced; None: not known.
        threads: that each rank computed with; None: not known.
    """

    size: int = 0
    threads: tuple[int | None, ...] = ()
    bucket_bytes: int | None = None
    plan: Any = None

    def checked(self) -> Self:
        """Return it; ValueError: it contradicts itself."""
        if len(self.threads) != self.size:
            raise ValueError(f"it has threads of {len(self.threads)} ranks, but {self.size} ranks")
        return self

    def prepare(self, world: Context, framework: Framework) -> None:
        """Take over threads and the size of buckets, before the optimizer is there (local)."""
        if self.size != world.topology.size:
            return
        if self.bucket_bytes is not None:
            size = BucketSize(self.bucket_bytes, "as in the checkpoint")
            world.bucket_sizes[world.world] = size
        threads = self.threads[world.topology.rank]
        if threads is not None:
            framework.use_threads(threads)

    def apply(self, loop: TrainingLoop, world: Context) -> None:
        """Take over the order of gradients (collective)."""
        if self.size == world.topology.size and self.plan is not None:
            loop.use_bucket_plan(self.plan)


def world_settings(
    world: Context, loop: TrainingLoop, threads: tuple[int | None, ...]
) -> dict[str, Any]:
    """Return what WorldFacts holds, of now (rank 0 only)."""
    size = world.bucket_sizes.get(world.world)
    return {
        "size": world.topology.size,
        "bucket_bytes": None if size is None else size.nbytes,
        "plan": loop.bucket_plan(),
        "threads": threads,
    }


class CheckpointLoader:
    """Reads a checkpoint on rank 0, in two steps.

    Args:
        options: of the run.
    """

    def __init__(self, options: TrainOptions) -> None:
        self._options = options
        self._found = LoadedCheckpoint()

    def find(self, tensors: TensorLibrary) -> WorldSettings:
        """Find the checkpoint that the options ask for; say which are damaged (rank 0 only).

        Args:
            tensors: what its tensors are to be, "pt" or "np".

        Raises:
            UsageError: none can be used.
        """
        self._found = find_checkpoint(self._options, tensors)
        for warning in self._found.bad:
            print(f"hvdtrain: {warning}", file=sys.stderr, flush=True)
        try:
            return WorldSettings(**self._found.content.get("world", {})).checked()
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"checkpoint {self._found.path} lacks what is needed: {error}"
            ) from error

    def begin_run(self, epoch_samples: int, state: TrainingState) -> RunStart:
        """Load what was found, and prepare the directory (rank 0 only).

        Raises:
            UsageError: it does not fit, or the directory cannot be used.
        """
        start = begin_run(self._options, epoch_samples, state, self._found)
        self._found = LoadedCheckpoint()  # its tensors take as much memory as the model
        return start


@dataclass(frozen=True)
class RunStart:
    """Where a run begins.

    Attributes:
        directory: for its results.
        progress: what a checkpoint has brought.
        origin: says where it goes on from; empty for a run that was not asked to go on.
        resumed: whether a checkpoint was loaded.
    """

    directory: Path
    progress: Progress
    origin: str = ""
    resumed: bool = False


def find_checkpoint(options: TrainOptions, tensors: TensorLibrary) -> LoadedCheckpoint:
    """Read the checkpoint to go on from, if the options ask for one (rank 0 only).

    Args:
        options: of the run.
        tensors: what its tensors are to be, "pt" or "np".

    Raises:
        UsageError: it is damaged or missing, or the directory cannot be read.
    """
    with usage_errors(options.out or RUNS):
        return _find(options, tensors)


def _find(options: TrainOptions, tensors: TensorLibrary) -> LoadedCheckpoint:
    if options.resume == "never":
        return LoadedCheckpoint()
    if options.resume != "auto" or options.out is None:
        path = Path(options.resume)
        return LoadedCheckpoint(path, load_checkpoint(path, tensors))
    found = newest_good(options.out, tensors)
    if found.path is None and found.bad:
        raise UsageError(
            f"no checkpoint in {options.out} can be used ({'; '.join(found.bad)}): start again "
            "with another --out"
        )
    return found


def begin_run(
    options: TrainOptions, epoch_samples: int, state: TrainingState, found: LoadedCheckpoint
) -> RunStart:
    """Load what was found, and prepare the directory (rank 0 only).

    Raises:
        UsageError: the checkpoint belongs to another model, the directory holds another run, or
            cannot be read or written.
    """
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
    """Make up for a run that was killed when it had written its best, and not yet marked it."""
    best = progress.best
    inside = resumed is not None and resumed.resolve().parent == directory.resolve()
    if resumed is not None and inside and best is not None and best.step == progress.step:
        mark_best(resumed)


def _refuse_to_mix(options: TrainOptions, resumed: Path | None) -> None:
    """Refuse a directory whose results this run would mix with its own or overwrite."""
    if options.out is None or options.resume == "auto":
        return
    files = checkpoint_files(options.out)
    others = [name for name in (METRICS, SUMMARY) if (options.out / name).exists()]
    if not files and not others:
        return
    if resumed is None or resumed.resolve().parent != options.out.resolve():
        raise UsageError(
            f"{options.out} holds the results of another run: go on there with --resume auto, or "
            "name another directory with --out"
        )
    if files and position_of(files[0]) > position_of(resumed):
        raise UsageError(
            f"{options.out} holds a later checkpoint, {files[0].name}: remove it, or name another "
            "directory with --out"
        )
