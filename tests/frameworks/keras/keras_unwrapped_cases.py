"""A fit of several ranks with a plain optimizer is warned of, and no other."""

import contextlib
import importlib
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
    raise EnoughError
    yield


def warnings_of(
    optimizer: Any, *callbacks: Any, kind: Any = None, frozen: bool = False, layers: Any = None
) -> list[str]:
    fitting.warn_once.cache_clear()
    said = io.StringIO()
    model = keras.Sequential(layers) if layers else dense_model(seed=hvd.rank())
    if kind is not None:
        model = kind(model.layers)
    model.trainable = not frozen
    with contextlib.redirect_stderr(said):
        model.compile(optimizer, loss="mse")
        for _ in range(2):
            with contextlib.suppress(EnoughError):
                model.fit(no_data(), verbose=0, callbacks=list(callbacks))
    return said.getvalue().splitlines()


def weights_that_differ_are_told() -> None:
    """Once, on rank 0, for each model, also of equal shapes."""
    x, y = np.ones([8, 3], np.float32), np.ones([8, 5], np.float32)
    told = hvd.size() > 1 and hvd.rank() == 0
    for seed, expected in ((0, 0), (hvd.rank(), told), (hvd.rank() + 2, told)):
        keras.utils.set_random_seed(seed)
        model = keras.Sequential([keras.Input([3]), keras.layers.Dense(5)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
        fit = partial(model.fit, x, y, batch_size=2, epochs=2, verbose=0)
        said = [line for line in logged(fit) if WEIGHTS_DIFFER in line]
        assert len(said) == expected, said


def decayed_weights_are_not_told_to_differ() -> None:
    """Where gradients of one rank take long, a graph could decay its weights before."""
    tf = importlib.import_module("tensorflow")
    variables = [keras.Variable(np.ones([64], np.float32)) for _ in range(4)]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, weight_decay=0.1))
    given = tf.ones([1000 if hvd.rank() == 0 else 1] * 2)

    @tf.function(autograph=False)
    def step(matrix: Any) -> None:
        for _ in range(4):
            matrix = tf.matmul(matrix, matrix) / 1000
        optimizer.apply([tf.ones([64]) + tf.reduce_mean(matrix)] * 4, variables)

    said = logged(lambda: [step(given) for _ in range(5)])
    assert not [line for line in said if WEIGHTS_DIFFER in line]


def plain_optimizers_are_warned_of() -> None:
    """Once, on rank 0, where there are others."""
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    average = hvd.callbacks.MetricAverageCallback()
    for optimizer, others in (("adam", []), (keras.optimizers.SGD(0.1), [average])):
        said = [line for line in warnings_of(optimizer, *others, broadcast) if "wrapped" in line]
        assert len(said) == (hvd.size() > 1 and hvd.rank() == 0), said
        name = "BroadcastGlobalVariablesCallback"
        for line in said:
            assert line.startswith(f"[rank 0/{hvd.size()}] fit: {name}, but the optimizer is")
            assert "compile(hvd.DistributedOptimizer(optimizer), ...)" in line


def what_may_be_right_is_not_warned_of() -> None:
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    adam = keras.optimizers.Adam
    scaled = keras.optimizers.LossScaleOptimizer(adam())
    for given, how in (
        (["adam"], {}),
        ([hvd.DistributedOptimizer(adam()), broadcast], {}),
        ([hvd.DistributedOptimizer(scaled), broadcast], {}),
        ([OwnOptimizer(0.1), broadcast], {}),
        (["adam", broadcast], {"kind": OwnStep}),
        (["adam", broadcast], {"frozen": True}),
        (["adam", broadcast, OwnCallback()], {}),
        (["adam", broadcast, keras.callbacks.LambdaCallback()], {}),
        (["adam", hvd.callbacks.MetricAverageCallback()], {}),
    ):
        assert not any("not wrapped" in line for line in warnings_of(*given, **how)), (given, how)


def layers_of_another_distribution_are_warned_of() -> None:
    """Once, on rank 0, where there are others; other backends refuse such layers."""
    if keras.backend.backend() != "tensorflow":
        return
    for synchronized in (False, True):
        normalize = keras.layers.BatchNormalization(synchronized=synchronized)
        layers = [keras.Input([3]), keras.Sequential([normalize])]
        said = warnings_of(hvd.DistributedOptimizer(keras.optimizers.SGD()), layers=layers)
        found = [line for line in said if "hvdtrain.tensorflow.SyncBatchNormalization()" in line]
        assert len(found) == (synchronized and hvd.size() > 1 and hvd.rank() == 0), said
