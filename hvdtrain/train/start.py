"""Where a run begins: its directory, and the place that a checkpoint has brought it to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.train.checkpoint.directory import (
    Found,
    checkpoint_files,
    mark_best,
    newest_good,
)
from hvdtrain.train.checkpoint.file import load_checkpoint
from hvdtrain.train.checkpoint.names import place_of
from hvdtrain.train.checkpoint.tensor_file import Framework
from hvdtrain.train.loop.protocol import State
from hvdtrain.train.options import RUNS, TrainOptions
from hvdtrain.train.progress import Progress, restore
from hvdtrain.train.records.files import new_directory, prepare_directory, refusing
from hvdtrain.train.records.requeue import remove_marker
from hvdtrain.train.records.results import METRICS, SUMMARY, drop_lines_after

__all__ = ["Found", "Start", "begin", "find_checkpoint"]


@dataclass(frozen=True)
class Start:
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


def find_checkpoint(options: TrainOptions, tensors: Framework) -> Found:
    """Read the checkpoint to go on from, if the options ask for one (rank 0 only).

    Args:
        options: of the run.
        tensors: what its tensors are to be, "pt" or "np".

    Raises:
        UsageError: it is damaged or missing, or the directory cannot be read.
    """
    with refusing(options.out or RUNS):
        return _find(options, tensors)


def _find(options: TrainOptions, tensors: Framework) -> Found:
    if options.resume == "never":
        return Found()
    if options.resume != "auto" or options.out is None:
        path = Path(options.resume)
        return Found(path, load_checkpoint(path, tensors))
    found = newest_good(options.out, tensors)
    if found.path is None and found.bad:
        raise UsageError(
            f"no checkpoint in {options.out} can be used ({'; '.join(found.bad)}): start again "
            "with another --out"
        )
    return found


def begin(options: TrainOptions, epoch_samples: int, state: State, found: Found) -> Start:
    """Load what was found, and prepare the directory (rank 0 only).

    Raises:
        UsageError: the checkpoint belongs to another model, the directory holds another run, or
            cannot be read or written.
    """
    with refusing(options.out or RUNS):
        return _begin(options, epoch_samples, state, found)


def _begin(options: TrainOptions, epoch_samples: int, state: State, found: Found) -> Start:
    _refuse_to_mix(options, found.path)
    progress, origin = Progress(), ""
    if found.path is not None:
        progress = restore(found.path, found.content, options, epoch_samples, state)
        origin = f"{found.path}, {progress.text} done"
    elif options.resume == "auto":
        origin = f"no checkpoint in {options.out}: starting with epoch 1"
    if options.out is None:
        directory = new_directory(RUNS, Path(options.recipe.partition(":")[0]).stem)
        return Start(directory, progress, origin, found.path is not None)
    prepare_directory(options.out)
    remove_marker(options.out)
    drop_lines_after(options.out, progress.step)
    _mark_if_best(options.out, found.path, progress)
    return Start(options.out, progress, origin, found.path is not None)


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
    if files and place_of(files[0]) > place_of(resumed):
        raise UsageError(
            f"{options.out} holds a later checkpoint, {files[0].name}: remove it, or name another "
            "directory with --out"
        )
