"""A classification data set that fits in memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Dataset", "Samples"]


@dataclass(frozen=True)
class Samples:
    """Inputs and their labels.

    Attributes:
        inputs: float32, [n, ...].
        labels: int64, [n].
    """

    inputs: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Dataset:
    """What is trained on and what is only evaluated."""

    train: Samples
    test: Samples
