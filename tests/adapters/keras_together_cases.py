"""`fit` on ranks whose data, callbacks or decisions differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras_fit_cases import Traced, dense_model, start
from keras_optimizer_cases import assert_close, digest
from raising import raising

import hvdtrain.keras as hvd
from hvdtrain.core.objects import allgather_object
from hvdtrain.errors import MismatchError

# Rows of each batch, by rank: other numbers of batches, and of rows in them.
BATCHES = [[4, 4, 3], [4, 1], [2]]


def rows_of(seed: int, rows: int) -> tuple[Any, Any]:
    random = np.random.default_rng(seed)
    return (
        random.normal(size=(rows, 3)).astype(np.float32),
        random.normal(size=(rows, 2)).astype(np.float32),
    )


def unevenly(rank: int) -> list[tuple[Any, Any]]:
    """Return a rank's batches of an epoch."""
    return [rows_of(10 * rank + number, rows) for number, rows in enumerate(BATCHES[rank])]


def all_ranks() -> list[tuple[Any, Any]]:
    """Return the batches of an epoch that ranks train on together."""
    every = [unevenly(rank) for rank in range(hvd.size())]
    steps = [[own[n] for own in every if n < len(own)] for n in range(len(every[0]))]
    return [tuple(np.concatenate(parts) for parts in zip(*step, strict=True)) for step in steps]


def as_generator(batches: list[tuple[Any, Any]]) -> Any:
    class Data(keras.utils.PyDataset):
        def __len__(self) -> int:
            return len(batches)

        def __getitem__(self, index: int) -> Any:
            return batches[index]

    return Data()


def uneven_data_end_together() -> str:
    ends = []
    makers = [
        lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        lambda: keras.optimizers.Adam(0.05, epsilon=1e-3),
    ]
    for make in makers[: 1 if keras.backend.backend() == "jax" else 2]:
        alone, model = dense_model(seed=5), dense_model(seed=5)
        alone.compile(make(), loss="mse")
        model.compile(hvd.DistributedOptimizer(make()), loss="mse")
        alone.fit(as_generator(all_ranks()), epochs=2, shuffle=False, verbose=0)
        Traced.calls = 0
        own = as_generator(unevenly(hvd.rank()))
        held = rows_of(99, 5)
        history = model.fit(
            own, epochs=2, shuffle=False, verbose=0, validation_data=held, callbacks=start()
        ).history
        assert_close(model.weights, alone.weights)
        assert_close(model.optimizer.variables, alone.optimizer.variables)
        want = alone.evaluate(*held, verbose=0)
        np.testing.assert_allclose(history["val_loss"][-1], want, rtol=1e-5)
        ends += [*model.weights, *model.optimizer.variables]
    return digest(ends)


CASES = [uneven_data_end_together]
