"""Where a run begins: its directory, and the epoch that a checkpoint has brought it to."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.train.checkpoint import checkpoint_files, checkpoint_position, load_checkpoint
from hvdtrain.train.files import new_directory, prepare_directory
from hvdtrain.train.frameworks.protocol import State
from hvdtrain.train.options import RUNS, TrainOptions
from hvdtrain.train.progress import Progress, restore
from hvdtrain.train.requeue import remove_marker
from hvdtrain.train.results import METRICS, SUMMARY, drop_metrics_after

__all__ = ["Start", "begin"]


@dataclass(frozen=True)
class Start:
    """Where a run begins.

    Attributes:
        directory: for its results.
        progress: what a checkpoint has brought.
        origin: says where it goes on from; empty for a run that was not asked to go on.
        warnings: names the checkpoints that are damaged.
    """

    directory: Path
    progress: Progress
    origin: str = ""
    warnings: list[str] = field(default_factory=list)


def begin(options: TrainOptions, state: State) -> Start:
    """Find the checkpoint to go on from, load it, and prepare the directory (rank 0 only).

    Raises:
        UsageError: a checkpoint is damaged or belongs to another model, the directory holds
            another run, or cannot be read or written.
    """
    try:
        return _begin(options, state)
    except OSError as error:
        raise UsageError(
            f"{error.filename} cannot be used ({error.strerror}): name another directory with --out"
        ) from error


def _begin(options: TrainOptions, state: State) -> Start:
    warnings: list[str] = []
    checkpoint = _checkpoint(options, warnings)
    _refuse_to_mix(options, checkpoint)
    progress, origin = Progress(), ""
    if checkpoint is not None:
        progress = restore(checkpoint.path, checkpoint.content, options, state)
        origin = f"{checkpoint.path}, {_done(progress)}"
    elif options.resume == "auto":
        origin = f"no checkpoint in {options.out}: starting with epoch 1"
    if options.out is None:
        return Start(new_directory(RUNS, options.recipe), progress, origin)
    prepare_directory(options.out)
    remove_marker(options.out)
    drop_metrics_after(options.out, progress.epoch)
    return Start(options.out, progress, origin, warnings)


def _done(progress: Progress) -> str:
    part = f" and {progress.part.samples} samples" if progress.part.samples else ""
    return f"{progress.epoch} epochs{part} done"


@dataclass(frozen=True)
class _Checkpoint:
    path: Path
    content: dict[str, Any]


def _checkpoint(options: TrainOptions, warnings: list[str]) -> _Checkpoint | None:
    """Read the checkpoint to go on from; None: begin with epoch 1."""
    if options.resume == "never":
        return None
    if options.resume != "auto" or options.out is None:
        path = Path(options.resume)
        return _Checkpoint(path, load_checkpoint(path))
    files = checkpoint_files(options.out)
    for path in files:
        try:
            return _Checkpoint(path, load_checkpoint(path))
        except UsageError as error:
            warnings.append(str(error))
    if files:
        raise UsageError(
            f"no checkpoint in {options.out} can be used ({'; '.join(warnings)}): start again with "
            "another --out"
        )
    return None


def _refuse_to_mix(options: TrainOptions, resumed: _Checkpoint | None) -> None:
    """Refuse a directory whose results this run would mix with its own or overwrite."""
    if options.out is None or options.resume == "auto":
        return
    files = checkpoint_files(options.out)
    others = [name for name in (METRICS, SUMMARY) if (options.out / name).exists()]
    if not files and not others:
        return
    if resumed is None or resumed.path.resolve().parent != options.out.resolve():
        raise UsageError(
            f"{options.out} holds the results of another run: go on there with --resume auto, or "
            "name another directory with --out"
        )
    if files and checkpoint_position(files[0]) > checkpoint_position(resumed.path):
        raise UsageError(
            f"{options.out} holds a later checkpoint, {files[0].name}: remove it, or name another "
            "directory with --out"
        )
