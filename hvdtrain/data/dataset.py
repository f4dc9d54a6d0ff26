"""A classification data set that fits in memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
    if isinstance(data, Samples):
        return False
    named = {kind.__name__ for kind in type(data).__mro__}
    return "IterableDataset" in named or not hasattr(data, "__getitem__")
