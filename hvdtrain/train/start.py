"""Where a run begins: its directory, and the epoch that a checkpoint has brought it to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hvdtrain.errors import UsageError
from hvdtrain.train.checkpoint import (
    checkpoint_epoch,
    checkpoint_files,
    load_checkpoint,
    save_checkpoint,
)
from hvdtrain.train.files import new_directory, prepare_directory
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.results import METRICS, SUMMARY, drop_metrics_after

__all__ = ["Progress", "Start", "begin", "save_progress"]

_RUNS = Path("runs")
# What a run cannot change half-way.
_FIXED = ("recipe", "framework", "dtype", "optimizer")


@dataclass(frozen=True)
class Progress:
    """What has been done since the very first start; times are rank 0's."""

    epoch: int = 0
    step: int = 0
    samples: int = 0
    total_seconds: float = 0.0
    communicate_seconds: float = 0.0


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


def begin(options: TrainOptions, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Start:
    """Find the checkpoint to go on from, load it, and prepare the directory (rank 0 only).

    Raises:
        UsageError: a checkpoint is damaged or belongs to another model, the directory holds
            another run, or cannot be written.
    """
    warnings: list[str] = []
    path = _checkpoint(options, warnings)
    _refuse_to_mix(options, path)
    progress, origin = Progress(), ""
    if path is not None:
        progress = _restore(path, load_checkpoint(path), options, model, optimizer)
        origin = f"{path}, {progress.epoch} epochs done"
    elif options.resume == "auto":
        origin = f"no checkpoint in {options.out}: starting with epoch 1"
    if options.out is None:
        return Start(new_directory(_RUNS, options.recipe), progress, origin)
    prepare_directory(options.out)
    drop_metrics_after(options.out, progress.epoch)
    return Start(options.out, progress, origin, warnings)


def save_progress(
    directory: Path,
    progress: Progress,
    options: TrainOptions,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
) -> Path:
    """Write the checkpoint of the last epoch (rank 0 only)."""
    content = {
        **vars(progress),
        "settings": {name: getattr(options, name) for name in _FIXED},
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    return save_checkpoint(directory, progress.epoch, content)


def _checkpoint(options: TrainOptions, warnings: list[str]) -> Path | None:
    """Return the checkpoint to go on from, or None to begin with epoch 1."""
    if options.resume == "never":
        return None
    if options.resume != "auto" or options.out is None:
        return Path(options.resume)
    files = checkpoint_files(options.out)
    for path in files:
        try:
            load_checkpoint(path)
            return path
        except UsageError as error:
            warnings.append(str(error))
    if files:
        raise UsageError(
            f"no checkpoint in {options.out} is whole ({', '.join(p.name for p in files)}): "
            "start again with another --out"
        )
    return None


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
    if files and checkpoint_epoch(files[0]) > checkpoint_epoch(resumed):
        raise UsageError(
            f"{options.out} holds a later checkpoint, {files[0].name}: remove it, or name another "
            "directory with --out"
        )


def _restore(
    path: Path,
    content: Mapping[str, Any],
    options: TrainOptions,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
) -> Progress:
    """Load a checkpoint's content after checking that it fits."""
    difference = _other_model(content["model"], model)
    if difference is not None:
        raise UsageError(f"checkpoint {path} belongs to another model: {difference}")
    try:
        settings = content["settings"]
        for name in _FIXED:
            if settings[name] != getattr(options, name):
                raise UsageError(
                    f"checkpoint {path} was made with {name} {settings[name]}, not "
                    f"{getattr(options, name)}"
                )
        progress = Progress(**{name: content[name] for name in vars(Progress())})
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"checkpoint {path} lacks what is needed: {error}") from error
    if progress.epoch > options.epochs:
        raise UsageError(
            f"checkpoint {path} has {progress.epoch} epochs, more than --epochs {options.epochs}: "
            "ask for more"
        )
    return progress


def _other_model(saved: Mapping[str, torch.Tensor], model: torch.nn.Module) -> str | None:
    """Say where the saved weights first differ from the model in name or shape."""
    own = model.state_dict()
    for name, tensor in own.items():
        if name not in saved:
            return f"it has no {name}"
        if saved[name].shape != tensor.shape:
            return f"{name} has shape {tuple(saved[name].shape)}, and {tuple(tensor.shape)} here"
    extra = next((name for name in saved if name not in own), None)
    return None if extra is None else f"it has {extra}, which is not here"
