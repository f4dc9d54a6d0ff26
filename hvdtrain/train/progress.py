"""The progress of a run, which its checkpoints hold and a resume restores."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.core.membership.world import Context
from hvdtrain.errors import UsageError
from hvdtrain.train.loop.protocol import Array, TrainingState
from hvdtrain.train.metrics import Totals
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.options.config_file import counted

# Options that a resume cannot change: the checkpoint would not fit, or its optimizer would bring
# back the old value. Within an epoch the order of the samples must not change either.
_FIXED = ("recipe", "framework", "dtype", "optimizer", "momentum", "weight_decay")
_FIXED_IN_EPOCH = ("seed",)
# `--framework tensorflow`, which was removed, trained the same models as `--framework keras`.
_RENAMED = {("framework", "tensorflow"): "keras"}


@dataclass(frozen=True)
class BestEvaluation:
    """The best evaluation so far."""

    name: str
    value: float
    epoch: float
    step: int
    since: int = 0


@dataclass(frozen=True)
class Progress:
    """What has been done since the very first start; times are rank 0's."""

    epoch: int = 0
    done: int = 0
    step: int = 0
    samples: int = 0
    total_seconds: float = 0.0
    communicate_seconds: float = 0.0
    part: Totals = field(default_factory=Totals)
    best: BestEvaluation | None = None

    def after(self, learned: Totals, steps: int) -> Progress:
        """Return the progress after some more steps of the same epoch."""
        return replace(
            self,
            done=self.done + learned.samples,
            step=self.step + steps,
            samples=self.samples + learned.samples,
            part=self.part + learned,
        )

    def next_epoch(self) -> Progress:
        """Return the progress at the start of the next epoch."""
        return replace(self, epoch=self.epoch + 1, done=0, part=Totals())

    @property
    def text(self) -> str:
        """The progress for people: "3 epochs and 120 samples"."""
        part = f" and {counted(self.done, 'sample')}" if self.done else ""
        return f"{counted(self.epoch, 'epoch')}{part}"


def checkpoint_content(
    progress: Progress, options: TrainOptions, epoch_samples: int
) -> dict[str, Any]:
    """Return what a checkpoint holds besides the state of model and optimizer."""
    part = progress.part
    return {
        **asdict(replace(progress, part=Totals())),
        "epoch_samples": epoch_samples,
        "part": {
            "samples": part.samples,
            "loss": part.loss,
            "counts": {name: np.asarray(counts) for name, counts in part.counts.items()},
        },
        "settings": {name: _setting(options, name) for name in _FIXED + _FIXED_IN_EPOCH},
    }


def restore_progress(
    path: Path,
    content: Mapping[str, Any],
    options: TrainOptions,
    epoch_samples: int,
    state: TrainingState,
) -> Progress:
    """Check that a checkpoint fits, load it, and return its progress (rank 0 only).

    Within an epoch the data must have as many samples as before: otherwise the rest of the epoch
    would not be the samples that are left.
    """
    try:
        _require_settings(path, content["settings"], options, _FIXED)
        difference = _other_model(content["model"], state.weights())
        if difference is not None:
            raise UsageError(f"checkpoint {path} belongs to another model: {difference}")
        progress = _progress(content)
        if progress.done:
            _require_settings(path, content["settings"], options, _FIXED_IN_EPOCH)
            if content["epoch_samples"] != epoch_samples:
                raise UsageError(
                    f"checkpoint {path} was made within an epoch of {content['epoch_samples']} "
                    f"samples, and this data set has {epoch_samples}: use the same data, or resume "
                    "from a checkpoint at the end of an epoch"
                )
        state.load(content)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"checkpoint {path} lacks what is needed: {error}") from error
    if (progress.epoch, progress.done) > (options.epochs, 0):
        raise UsageError(
            f"checkpoint {path} has {progress.text}, more than --epochs {options.epochs}: ask "
            "for more"
        )
    return progress


def _other_model(saved: Mapping[str, Any], own: Mapping[str, Array]) -> str | None:
    """Describe the first difference between saved weights and the model in name or shape."""
    for name, array in own.items():
        if not hasattr(saved.get(name), "shape"):
            return f"it has no {name}"
        if tuple(saved[name].shape) != array.shape:
            return f"{name} has shape {tuple(saved[name].shape)}, and {array.shape} here"
    tensors = [name for name, value in saved.items() if hasattr(value, "shape")]
    extra = next((name for name in tensors if name not in own), None)
    return None if extra is None else f"it has {extra}, which is not here"


def _require_settings(
    path: Path, settings: Mapping[str, Any], options: TrainOptions, names: Sequence[str]
) -> None:
    for name in names:
        own = _setting(options, name)
        if _RENAMED.get((name, settings[name]), settings[name]) != own:
            raise UsageError(f"checkpoint {path} was made with {name} {settings[name]}, not {own}")


def _setting(options: TrainOptions, name: str) -> Any:
    """Return an option; for a recipe in a file only its name, because the file may have moved."""
    location = options.recipe_location
    if name == "recipe" and location.path is not None:
        return f"{location.path.name}:{location.function}"
    return getattr(options, name)


def _progress(content: Mapping[str, Any]) -> Progress:
    """Read the progress; ValueError if a count or a time is invalid."""
    part, best = content["part"], content["best"]
    if not isinstance(part["loss"], float):
        raise ValueError(f"its loss is {part['loss']!r}")
    counts = {name: np.asarray(value, np.float64) for name, value in part["counts"].items()}
    return Progress(
        epoch=_count(content, "epoch"),
        done=_count(content, "done"),
        step=_count(content, "step"),
        samples=_count(content, "samples"),
        total_seconds=_seconds(content, "total_seconds"),
        communicate_seconds=_seconds(content, "communicate_seconds"),
        part=Totals(_count(part, "samples"), part["loss"], counts),
        best=None if best is None else BestEvaluation(**best),
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


class RunClock:
    """Measures the time of training, and the part of it spent waiting for communication."""

    def __init__(self, world: Context, before: Progress) -> None:
        self._blocked = world.blocked
        self._total_from = time.perf_counter() - before.total_seconds
        self._communicate_from = world.blocked.seconds - before.communicate_seconds

    @property
    def total_seconds(self) -> float:
        """Seconds since the very first start, pauses between starts excluded."""
        return time.perf_counter() - self._total_from

    def read(self, progress: Progress) -> Progress:
        """Return the progress with the current times."""
        communicate = self._blocked.seconds - self._communicate_from
        return replace(progress, total_seconds=self.total_seconds, communicate_seconds=communicate)
