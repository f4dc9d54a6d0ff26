"""What a trained model says of the samples in files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdtrain.errors import UsageError
from hvdtrain.train.building import Built
from hvdtrain.train.loop.agree import call_everywhere
from hvdtrain.train.recipes.recipe import Recipe

__all__ = ["Predicted", "lines_of", "predict_files", "write_outputs"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Predicted:
    """The outputs of a model.

    Attributes:
        outputs: of all samples, [samples, ...].
        counts: for each file its path and how many samples are in it.
    """

    outputs: Array
    counts: list[tuple[Path, int]]


def predict_files(built: Built, files: Sequence[Path]) -> Predicted:
    """Compute the outputs for all samples in files, each on one rank (collective).

    Raises:
        UsageError: on every rank, a file cannot be read, or files do not go together.
    """
    inputs = [call_everywhere(partial(_read, built.recipe, path)) for path in files]
    shapes = {array.shape[1:]: path for array, path in zip(inputs, files, strict=True)}
    if len(shapes) > 1:
        told = ", ".join(f"{path}: {shape}" for shape, path in shapes.items())
        raise UsageError(f"the samples of all files must have one shape, got {told}")
    outputs = built.loop.predict(np.concatenate(inputs))
    counts = [(path, len(array)) for path, array in zip(files, inputs, strict=True)]
    return Predicted(outputs, counts)


def lines_of(predicted: Predicted, classes: Sequence[str] | None) -> Iterator[str]:
    """Return a JSON object for each sample.

    Args:
        predicted: the outputs.
        classes: their names, where outputs are one score per class; None: they are not.
    """
    row = 0
    for path, count in predicted.counts:
        for number in range(count):
            told: dict[str, Any] = {"file": str(path), "row": number}
            outputs = predicted.outputs[row]
            if classes is not None and outputs.shape == (len(classes),):
                best = int(outputs.argmax())
                told["class"] = classes[best]
                told["probability"] = float(_softmax(outputs)[best])
            else:
                told["output"] = outputs.tolist()
            yield json.dumps(told)
            row += 1


def write_outputs(path: Path, predicted: Predicted) -> None:
    """Write the outputs of all samples as one array.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        np.save(path, predicted.outputs, allow_pickle=False)
    except OSError as error:
        raise UsageError(f"--out {path} cannot be written: {error.strerror}") from error


def _read(recipe: Recipe, path: Path) -> Array:
    """Read the samples in a file, [samples, ...]."""
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


def _softmax(scores: Array) -> Array:
    powers = np.exp(scores.astype(np.float64) - float(scores.max()))
    probabilities: Array = powers / powers.sum()
    return probabilities
