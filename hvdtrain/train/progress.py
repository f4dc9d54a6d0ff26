"""What a run has done so far, kept in its checkpoints and taken from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.train.checkpoint import save_checkpoint
from hvdtrain.train.frameworks.protocol import Array, State
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.results import Sums

__all__ = ["Progress", "restore", "save_progress"]

# What a run cannot change half-way, and what it cannot within an epoch: the order of its samples.
_FIXED = ("recipe", "framework", "dtype", "optimizer")
_FIXED_IN_EPOCH = ("seed",)


@dataclass(frozen=True)
class Progress:
    """What has been done since the very first start; times are rank 0's.

    Attributes:
        epoch: epochs done.
        step: optimizer steps done.
        samples: training samples used.
        part: of these, what was done of an epoch that is not whole.
    """

    epoch: int = 0
    step: int = 0
    samples: int = 0
    total_seconds: float = 0.0
    communicate_seconds: float = 0.0
    part: Sums = field(default_factory=Sums)


def save_progress(directory: Path, progress: Progress, options: TrainOptions, state: State) -> Path:
    """Write the checkpoint of where the run is (rank 0 only)."""
    content = {
        **asdict(progress),
        "settings": {name: getattr(options, name) for name in _FIXED + _FIXED_IN_EPOCH},
        **state.content(),
    }
    return save_checkpoint(directory, progress.epoch, progress.part.samples, content, state.suffix)


def restore(
    path: Path, content: Mapping[str, Any], options: TrainOptions, state: State
) -> Progress:
    """Load a checkpoint's content after checking that it fits (rank 0 only).

    Raises:
        UsageError: it belongs to another model, has other settings or more epochs than are
            asked for, or lacks what is needed; the message names the checkpoint.
    """
    try:
        _require_settings(path, content["settings"], options, _FIXED)
        difference = _other_model(content["model"], state.weights())
        if difference is not None:
            raise UsageError(f"checkpoint {path} belongs to another model: {difference}")
        progress = _progress(content)
        if progress.part.samples:
            _require_settings(path, content["settings"], options, _FIXED_IN_EPOCH)
        state.load(content)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"checkpoint {path} lacks what is needed: {error}") from error
    if (progress.epoch, progress.part.samples) > (options.epochs, 0):
        part = f" and {progress.part.samples} samples" if progress.part.samples else ""
        raise UsageError(
            f"checkpoint {path} has {progress.epoch} epochs{part}, more than --epochs "
            f"{options.epochs}: ask for more"
        )
    return progress


def _other_model(saved: Mapping[str, Any], own: Mapping[str, Array]) -> str | None:
    """Say where the saved weights first differ from the model in name or shape."""
    for name, array in own.items():
        if name not in saved:
            return f"it has no {name}"
        if tuple(saved[name].shape) != array.shape:
            return f"{name} has shape {tuple(saved[name].shape)}, and {array.shape} here"
    extra = next((name for name in saved if name not in own), None)
    return None if extra is None else f"it has {extra}, which is not here"


def _require_settings(
    path: Path, settings: Mapping[str, Any], options: TrainOptions, names: Sequence[str]
) -> None:
    for name in names:
        if settings[name] != getattr(options, name):
            raise UsageError(
                f"checkpoint {path} was made with {name} {settings[name]}, not "
                f"{getattr(options, name)}"
            )


def _progress(content: Mapping[str, Any]) -> Progress:
    """Read the progress; ValueError names a count or a time that is none."""
    part = content.get("part", asdict(Sums()))  # which those of whole epochs lacked once
    if not isinstance(part["loss"], float):
        raise ValueError(f"its loss is {part['loss']!r}")
    return Progress(
        _count(content, "epoch"),
        _count(content, "step"),
        _count(content, "samples"),
        _seconds(content, "total_seconds"),
        _seconds(content, "communicate_seconds"),
        Sums(part["loss"], _count(part, "hits"), _count(part, "samples")),
    )


def _count(content: Mapping[str, Any], name: str) -> int:
    value = content[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"its {name} is {value!r}")
    return value


def _seconds(content: Mapping[str, Any], name: str) -> float:
    value = content[name]
    counted = isinstance(value, int) and not isinstance(value, bool)
    if not (counted or (isinstance(value, float) and math.isfinite(value))) or value < 0:
        raise ValueError(f"its {name} is {value!r}")
    return float(value)
