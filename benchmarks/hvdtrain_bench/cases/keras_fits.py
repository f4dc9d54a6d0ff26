"""`fit` of Keras on all ranks, with and without communication, on the current backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

import hvdtrain
import hvdtrain.keras as hvd
from hvdtrain_bench.analysis.judge import HVDTRAIN, NO_COMMUNICATION
from hvdtrain_bench.cases.checked import Agreement
from hvdtrain_bench.harness.turns import Bench

INPUTS, HIDDEN, CLASSES = 1024, (2048,) * 6, 1024


class FirstWeights:
    """A model with the weights of its start, which are equal on all ranks."""

    def __init__(self, build: Callable[[], Any]) -> None:
        keras.utils.set_random_seed(1)
        self.model = build()
        self._first = self.model.get_weights()

    def restart(self) -> None:
        self.model.set_weights(self._first)

    def moved(self) -> float:
        pairs = zip(self.model.get_weights(), self._first, strict=True)
        return sum(float(np.abs(now - then).sum(dtype=np.float64)) for now, then in pairs)


def mlp(hidden: Sequence[int] = HIDDEN) -> Any:
    """Return the MLP of the other benchmarks, or one with other hidden layers."""
    layers = [keras.layers.Dense(width, activation="relu") for width in hidden]
    return keras.Sequential([keras.Input([INPUTS]), *layers, keras.layers.Dense(CLASSES)])


_AGAIN = "no communication again"
# Steps of a fit for each step of a turn, so that its start and end matter little.
_STEPS = 8


def measure(bench: Bench) -> None:
    ranks, settings = bench.ranks, bench.settings
    backend = keras.backend.backend()
    library = f"Keras {keras.__version__} on {backend}"
    for model, title, build, shape, classes, batch in (
        ("mnist-cnn", "MNIST CNN, 1.2 M", _cnn, (28, 28, 1), 10, 64),
        ("mlp", "MLP, 25.2 M", mlp, (INPUTS,), CLASSES, 16),
    ):
        if model not in settings.models:
            continue
        steps = _STEPS * settings.steps_per_turn
        name = f"fit of Keras on {backend}, {title}, {steps} steps of {batch} samples per rank"
        bench.say(name)
        random = np.random.default_rng(ranks.rank)
        inputs = random.normal(size=(steps * batch, *shape)).astype(np.float32)
        data = inputs, random.integers(classes, size=steps * batch)
        agreement = Agreement(ranks, alike=False)  # dropout differs
        ours = _Fit(build, data, batch, wrap=hvd.DistributedOptimizer)
        contenders = [
            *(
                agreement.without_communication(base, library, _Fit(build, data, batch, wrap=None))
                for base in (NO_COMMUNICATION, _AGAIN)
            ),
            agreement.together(HVDTRAIN, f"hvdtrain {hvdtrain.__version__}, {library}", ours),
        ]
        seconds = bench.take_turns(contenders, fewest_calls=1)
        about = {"title": title, "backend": backend, "samples": batch, "steps": steps}
        bench.add(name, seconds, NO_COMMUNICATION, _AGAIN, **about)


class _Fit(FirstWeights):
    def __init__(
        self,
        build: Callable[[], Any],
        data: tuple[Any, Any],
        batch: int,
        wrap: Callable[[Any], Any] | None,
    ) -> None:
        super().__init__(build)
        self._data, self._batch = data, batch
        optimizer = keras.optimizers.SGD(0.01)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.model.compile(wrap(optimizer) if wrap else optimizer, loss)

    def step(self) -> None:
        self.model.fit(*self._data, batch_size=self._batch, epochs=1, shuffle=False, verbose=0)


def _cnn() -> Any:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input([28, 28, 1]),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Dropout(0.25),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dropout(0.5),
            layers.Dense(10),
        ]
    )
