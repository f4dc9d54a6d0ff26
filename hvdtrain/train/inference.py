"""Inference with the model of a finished run: load it, and compute its outputs for files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdtrain.collective import collective
from hvdtrain.errors import UsageError
from hvdtrain.train.checkpoints import best_file, checkpoint_files
from hvdtrain.train.config_file import resolve
from hvdtrain.train.loop.gather import call_everywhere
from hvdtrain.train.loop.protocol import TrainingState
from hvdtrain.train.options import TrainOptions
from hvdtrain.train.parameter_server.protocol import ALLREDUCE
from hvdtrain.train.recipe import Recipe
from hvdtrain.train.records import CONFIG
from hvdtrain.train.resume import RunState, StateLoader
from hvdtrain.train.setup import TrainingSetup, set_up


class _ReadOnlyLoader(StateLoader):
    """Loads a checkpoint and leaves the directory of its run unchanged."""

    def begin_run(self, epoch_samples: int, state: TrainingState) -> RunState:
        path, samples = self.found.path, self.found.content.get("epoch_samples", epoch_samples)
        assert path is not None
        # Not resumed: no step is taken, and no state of an exchange is needed.
        return RunState(path.parent, self._restore(samples, state), str(path))


def options_of_run(run: Path, checkpoint: str, changes: Mapping[str, Any]) -> TrainOptions:
    """Return the options of a run, changed so that they load one of its checkpoints."""
    config = run / CONFIG
    if not config.is_file():
        raise UsageError(f"{run} is not the directory of a run: there is no {CONFIG} in it")
    options = resolve(changes, config)
    path = _checkpoint(run, checkpoint)
    epochs = max(options.epochs, 1)
    # One rank can evaluate what a parameter server has trained, on all samples.
    options = replace(options, epochs=epochs, strategy=ALLREDUCE, overfit=None)
    return replace(options, out=None, resume=str(path))


@collective
def open_run(options: TrainOptions) -> TrainingSetup:
    """Build the model of a run with the weights of its checkpoint."""
    return set_up(options, None, _ReadOnlyLoader(options))


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


Array = npt.NDArray[Any]


# Each file with the number of its samples.
Counts = list[tuple[Path, int]]


@collective
def predict_files(setup: TrainingSetup, files: Sequence[Path]) -> tuple[Array, Counts]:
    """Compute the outputs for all samples in files, each on one rank."""
    inputs = [call_everywhere(partial(_read, setup.recipe, path)) for path in files]
    shapes = {array.shape[1:]: path for array, path in zip(inputs, files, strict=True)}
    if len(shapes) > 1:
        found = ", ".join(f"{path}: {shape}" for shape, path in shapes.items())
        raise UsageError(f"the samples of all files must have one shape, got {found}")
    outputs = setup.loop.predict(np.concatenate(inputs))
    counts = [(path, len(array)) for path, array in zip(files, inputs, strict=True)]
    return outputs, counts


def prediction_lines(
    outputs: Array, counts: Counts, classes: Sequence[str] | None
) -> Iterator[str]:
    """Yield a JSON object for each sample."""
    places = ((path, number) for path, count in counts for number in range(count))
    for (path, number), output in zip(places, outputs, strict=True):
        line: dict[str, Any] = {"file": str(path), "row": number}
        if classes is not None and output.shape == (len(classes),):
            best = int(output.argmax())
            powers = np.exp(output.astype(np.float64) - float(output.max()))
            line["class"] = classes[best]
            line["probability"] = float(powers[best] / powers.sum())
        else:
            line["output"] = output.tolist()
        yield json.dumps(line)


def write_outputs(path: Path, outputs: Array) -> None:
    try:
        np.save(path, outputs, allow_pickle=False)
    except OSError as error:
        raise UsageError(f"--out {path} cannot be written: {error.strerror}") from error


def _read(recipe: Recipe, path: Path) -> Array:
    try:
        if recipe.read is not None:
            array = np.asarray(recipe.read(path))
        else:
            array = np.asarray(np.load(path, allow_pickle=False))
    except FileNotFoundError as error:
        raise UsageError(f"there is no file {path}") from error
    except (OSError, ValueError, EOFError) as error:
        wanted = "an array in numpy's .npy" if recipe.read is None else "what the recipe reads"
        raise UsageError(f"{path} is not {wanted}: {error}") from error
    if array.dtype.kind not in "fiub":
        raise UsageError(f"{path} holds no numbers, but {array.dtype}")
    if array.ndim == 0 or not len(array):
        raise UsageError(f"{path} must hold an array [samples, ...] of at least one sample")
    return array
