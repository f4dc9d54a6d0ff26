"""A recipe for Keras whose ranks kill themselves when they read a sample that KILLS names."""

import keras
import numpy as np
from disturbances import Killed

from hvdtrain.data.dataset import Samples
from hvdtrain.train.recipe import Recipe

KILLED = Killed()


class Killing:
    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        KILLED.at("read")
        return self._samples.inputs[index], self._samples.labels[index]


def points(rng: np.random.Generator, count: int) -> Samples:
    inputs = rng.standard_normal((count, 16), dtype=np.float32)
    return Samples(inputs, (inputs[:, :5].sum(1) > 0).astype(np.int64))


def recipe() -> Recipe:
    rng = np.random.default_rng(7)
    layers = [keras.layers.Dense(64, "relu"), keras.layers.Dense(2)]
    return Recipe(
        model=keras.Sequential([keras.Input((16,)), *layers]),
        train=Killing(points(rng, 100)),
        test=points(rng, 40),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics={"accuracy": keras.metrics.SparseCategoricalAccuracy()},
    )
