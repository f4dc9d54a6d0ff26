"""Synthetic data of any shape, for measurements or to try a model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hvdtrain.data.dataset import Dataset, Samples
from hvdtrain.errors import UsageError


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
