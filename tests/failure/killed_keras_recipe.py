"""A recipe for Keras whose ranks kill themselves when they read a sample that a variable names."""

from __future__ import annotations

import os
import signal

import keras
import numpy as np

from hvdtrain.data.dataset import Samples
from hvdtrain.train.recipes.recipe import Recipe


class Killing:
    """Training samples; KILLS="RANK:NUMBER[:leave] ..." names the reads that kill their rank."""

    count = 0  # also after the recipe was made anew

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        Killing.count += 1
        if Killing.count in SIGNALS:
            os.kill(os.getpid(), SIGNALS[Killing.count])
        return self._samples.inputs[index], self._samples.labels[index]


def asked() -> dict[int, signal.Signals]:
    """Return the signals that this rank sends itself, by number of the read."""
    own = os.environ.get("OMPI_COMM_WORLD_RANK", "0")
    kills = [kill.split(":") for kill in os.environ.get("KILLS", "").split()]
    return {
        int(number): signal.SIGUSR2 if leaves else signal.SIGKILL
        for rank, number, *leaves in kills
        if rank == own
    }


SIGNALS = asked()


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
