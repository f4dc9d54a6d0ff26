"""Classification data sets that fit in memory, and synthetic ones of any shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdtrain.data.sampling import Indices, sample_generator
from hvdtrain.errors import UsageError

__all__ = ["Dataset", "Samples", "is_stream"]


@dataclass(frozen=True)
class Samples:
    """Inputs and their labels.

    Attributes:
        inputs: float32 [n, ...].
        labels: int64 [n].
    """

    inputs: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.inputs[index], self.labels[index]


@dataclass(frozen=True)
class Dataset:
    """Training and test samples.

    Attributes:
        train: samples to train on.
        test: samples that are only evaluated.
    """

    train: Samples
    test: Samples


def is_stream(data: object) -> bool:
    """Return whether samples can only be read one after the other, and not by number.

    torch's IterableDataset, and classes of the same name, have an [index] that only raises.
    """
    named = {kind.__name__ for kind in type(data).__mro__}
    return "IterableDataset" in named or not hasattr(data, "__getitem__")


Augment = Callable[[Any, np.random.Generator], Any]


def augmented(sample: Any, augment: Augment | None, seed: int, epoch: int, index: int) -> Any:
    """Return (input, target) with the input as a recipe's `augment` changes it in an epoch."""
    if augment is None:
        return sample
    inputs, targets = sample
    return augment(inputs, sample_generator(seed, epoch, index)), targets


class _Selected:
    """Some samples of data that have [index]."""

    def __init__(self, data: Any, numbers: Indices) -> None:
        self._data, self._numbers = data, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Any:
        return self._data[int(self._numbers[index])]


def selected(data: Any, numbers: Indices) -> Any:
    """Return the samples of these numbers, from data that is no stream."""
    if isinstance(data, Samples):
        return Samples(data.inputs[numbers], data.labels[numbers])
    return _Selected(data, numbers)


def make_synthetic(
    samples: int, shape: Sequence[int], classes: int, seed: int = 0, test_samples: int = 0
) -> Dataset:
    """Make inputs [n, *shape] and labels that a network can learn something from.

    An input is noise of standard deviation 1, with 1 added where the flat index, modulo the number
    of classes, equals the label.
    """
    for name, value in (
        ("samples", samples),
        ("classes", classes),
        ("shape", min(shape, default=0)),
    ):
        if value < 1:
            raise UsageError(f"synthetic data: {name} must be at least 1, got {value}")
    generator = np.random.Generator(np.random.PCG64(seed))
    tests = test_samples or max(1, samples // 10)
    return Dataset(*(_made(count, shape, classes, generator) for count in (samples, tests)))


def _made(
    count: int, shape: Sequence[int], classes: int, generator: np.random.Generator
) -> Samples:
    labels = generator.integers(classes, size=count)
    inputs = generator.standard_normal((count, math.prod(shape)), dtype=np.float32)
    inputs += np.arange(inputs.shape[1]) % classes == labels[:, None]
    return Samples(inputs.reshape(count, *shape), labels)
