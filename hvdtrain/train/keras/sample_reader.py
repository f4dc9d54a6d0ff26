"""Reading samples by number as arrays, for Keras."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdtrain.data.dataset import Samples, is_stream
from hvdtrain.data.sampling.seeds import sample_generator, sample_seed, seed_generators
from hvdtrain.data.sampling.sharding import Indices
from hvdtrain.errors import UsageError


class SampleReader:
    """Reads samples from arrays or from a map-style data set.

    Args:
        data: Samples, or a data set with len() and [index].
    """

    def __init__(self, data: Any, dtype: str, seed: int, augment: Any = None) -> None:
        if is_stream(data):
            raise UsageError(
                "with Keras the samples of a recipe must have len() and [index], "
                f"and {type(data).__name__} has not: take --framework torch for streams"
            )
        self._data, self._dtype, self._seed, self._augment = data, dtype, seed, augment

    def __len__(self) -> int:
        return len(self._data)

    def read(self, rows: Indices, epoch: int = 0) -> tuple[Any, Any]:
        """Return the inputs [n, ...] and the targets [n, ...] of samples.

        Args:
            rows: int64 numbers of the samples, [n].
        """
        if isinstance(self._data, Samples) and self._augment is None:
            inputs, targets = self._data.inputs[rows], self._data.labels[rows]
        else:
            pairs = [self._sample(int(index), epoch) for index in rows]
            inputs, targets = (np.stack(column) for column in zip(*pairs, strict=True))
        return self._cast(inputs), self._cast(targets)

    def _sample(self, index: int, epoch: int) -> tuple[Any, Any]:
        if isinstance(self._data, Samples):
            inputs, targets = self._data.inputs[index], self._data.labels[index]
        else:
            seed_generators(sample_seed(self._seed, epoch, index))
            inputs, targets = self._data[index]
        if self._augment is not None:
            inputs = self._augment(inputs, sample_generator(self._seed, epoch, index))
        return np.asarray(inputs), np.asarray(targets)

    def _cast(self, array: Any) -> Any:
        return array.astype(self._dtype) if array.dtype.kind == "f" else array
