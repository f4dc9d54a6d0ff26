"""A fit of several ranks with a plain optimizer is warned of, and no other."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from functools import partial
from typing import Any

import keras
import numpy as np
from keras_fit_cases import dense_model
from logged import WEIGHTS_DIFFER, logged

import hvdtrain.keras as hvd
from hvdtrain.keras import fitting


class OwnStep(keras.Sequential):
    """May reduce its gradients itself."""

    def train_step(self, *given: Any) -> Any:
        return super().train_step(*given)


class OwnOptimizer(keras.optimizers.SGD):
    """May reduce gradients itself."""


class OwnCallback(keras.callbacks.Callback):
    """May average weights itself."""


class EnoughError(Exception):
    """Ends a fit before its first step, which would only take time."""


def no_data() -> Iterator[Any]:
    """End the fit that asks for the first batch."""
    raise EnoughError
    yield


def warnings_of(optimizer: Any, *callbacks: Any, kind: Any = None, frozen: bool = False) -> str:
    """Return what two fits say on this rank."""
    fitting.warn_once.cache_clear()
    said = io.StringIO()
    model = dense_model(seed=hvd.rank())
    if kind is not None:
        model = kind(model.layers)
    model.trainable = not frozen
    with contextlib.redirect_stderr(said):
        model.compile(optimizer, loss="mse")
        for _ in range(2):
            with contextlib.suppress(EnoughError):
                model.fit(no_data(), verbose=0, callbacks=list(callbacks))
    lines = said.getvalue().splitlines(keepends=True)
    return "".join(line for line in lines if "not wrapped" in line)


def plain_optimizers_are_warned_of() -> None:
    """Once, on rank 0, where there are others."""
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    average = hvd.callbacks.MetricAverageCallback()
    for optimizer, others in (("adam", []), (keras.optimizers.SGD(0.1), [average])):
        said = warnings_of(optimizer, *others, broadcast)
        if hvd.size() == 1 or hvd.rank() > 0:
            assert said == ""
            continue
        (line,) = said.splitlines()
        name = "BroadcastGlobalVariablesCallback"
        assert line.startswith(f"[rank 0/{hvd.size()}] fit: {name}, but the optimizer is")
        assert "compile(hvd.DistributedOptimizer(optimizer), ...)" in line


def what_may_be_right_is_not_warned_of() -> None:
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    adam = keras.optimizers.Adam
    assert warnings_of("adam") == ""
    assert warnings_of(hvd.DistributedOptimizer(adam()), broadcast) == ""
    scaled = keras.optimizers.LossScaleOptimizer(adam())
    assert warnings_of(hvd.DistributedOptimizer(scaled), broadcast) == ""
    assert warnings_of(OwnOptimizer(0.1), broadcast) == ""
    assert warnings_of("adam", broadcast, kind=OwnStep) == ""
    assert warnings_of("adam", broadcast, frozen=True) == ""
    assert warnings_of("adam", broadcast, OwnCallback()) == ""
    assert warnings_of("adam", broadcast, keras.callbacks.LambdaCallback()) == ""
    assert warnings_of("adam", hvd.callbacks.MetricAverageCallback()) == ""


def layers_of_another_distribution_are_warned_of() -> None:
    """Once, on rank 0, where there are others; other backends refuse such layers."""
    if keras.backend.backend() != "tensorflow":
        return
    for synchronized in (False, True):
        fitting.warn_once.cache_clear()
        said = io.StringIO()
        normalize = keras.layers.BatchNormalization(synchronized=synchronized)
        model = keras.Sequential([keras.Input([3]), keras.Sequential([normalize])])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD()), loss="mse")
        with contextlib.redirect_stderr(said):
            for _ in range(2):
                with contextlib.suppress(EnoughError):
                    model.fit(no_data(), verbose=0)
        expected = int(synchronized and hvd.size() > 1 and hvd.rank() == 0)
        assert said.getvalue().count("hvdtrain.tensorflow.SyncBatchNormalization()") == expected


def weights_that_differ_are_told() -> None:
    """Once, on rank 0."""
    x = np.ones([8, 3], np.float32)
    for seed, expected in ((0, 0), (hvd.rank(), hvd.size() > 1 and hvd.rank() == 0)):
        model = dense_model(seed)
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
        fit = partial(model.fit, x, x[:, :2], batch_size=2, epochs=2, verbose=0)
        said = [line for line in logged(fit) if WEIGHTS_DIFFER in line]
        assert len(said) == expected, said
