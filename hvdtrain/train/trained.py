"""A model that was trained, taken from the directory of its run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.train.building import Built, build
from hvdtrain.train.checkpoint.directory import best_file, checkpoint_files
from hvdtrain.train.config.config_file import resolve
from hvdtrain.train.loop.protocol import State
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.progress import Progress, restore
from hvdtrain.train.records.environment import CONFIG
from hvdtrain.train.resumption import Resumption
from hvdtrain.train.start import Start

__all__ = ["open_run", "options_of_run"]


class _Loading(Resumption):
    """Loads a checkpoint, and leaves the directory as it is."""

    def begin(self, epoch_samples: int, state: State) -> Start:
        """Load what was found, with whatever data there are (rank 0 only)."""
        path, progress = self._found.path, Progress()
        assert path is not None
        content = self._found.content
        samples = content.get("epoch_samples", epoch_samples)
        progress = restore(path, content, self._options, samples, state)
        return Start(path.parent, progress, str(path), resumed=True)


def options_of_run(run: Path, checkpoint: str, changes: Mapping[str, Any]) -> TrainOptions:
    """Return the options of a run, to load one of its checkpoints (local).

    Args:
        run: its directory.
        checkpoint: "best" (the newest, where no best one is), "newest", or a path.
        changes: options that are to be others now, by name.

    Raises:
        UsageError: it is no run, or has no checkpoint.
    """
    config = run / CONFIG
    if not config.is_file():
        raise UsageError(f"{run} is not the directory of a run: there is no {CONFIG} in it")
    options = resolve(changes, config)
    path = _checkpoint(run, checkpoint)
    return replace(options, out=None, resume=str(path), epochs=max(options.epochs, 1))


def open_run(options: TrainOptions) -> Built:
    """Build the model of a run with the weights of its checkpoint (collective).

    Raises:
        UsageError: it does not fit.
    """
    return build(options, None, _Loading(options))


def _checkpoint(run: Path, wanted: str) -> Path:
    if wanted not in ("best", "newest"):
        return Path(wanted)
    try:
        best, files = best_file(run), checkpoint_files(run)
    except OSError as error:
        raise UsageError(f"{run} cannot be read: {error.strerror}") from error
    if wanted == "best" and best is not None:
        return best
    if not files:
        raise UsageError(f"there is no checkpoint in {run}: train there first")
    return files[0]
