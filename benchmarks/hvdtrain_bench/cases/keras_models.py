"""Models of Keras that start from the same weights in every turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

INPUTS, HIDDEN, CLASSES = 1024, (2048,) * 6, 1024


class FirstWeights:
    """A model with the weights of its start, which are equal on all ranks."""

    def __init__(self, build: Callable[[], Any]) -> None:
        keras.utils.set_random_seed(1)
        self.model = build()
        self._first = self.model.get_weights()

    def restart(self) -> None:
        """Return to the first weights."""
        self.model.set_weights(self._first)

    def moved(self) -> float:
        """Return the sum of the absolute changes of all weights."""
        pairs = zip(self.model.get_weights(), self._first, strict=True)
        return sum(float(np.abs(now - then).sum(dtype=np.float64)) for now, then in pairs)


def mlp(hidden: Sequence[int] = HIDDEN) -> Any:
    """Return the MLP of the other benchmarks, or one with other hidden layers."""
    layers = [keras.layers.Dense(width, activation="relu") for width in hidden]
    return keras.Sequential([keras.Input([INPUTS]), *layers, keras.layers.Dense(CLASSES)])
