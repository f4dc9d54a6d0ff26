"""Callbacks of hvdtrain.keras, against formulas."""

import os
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras_fit_cases import STEPS, data, dense_model, fit, shared_model
from keras_optimizer_cases import digest
from raising import raising

import hvdtrain.keras as hvd
from hvdtrain.core.objects import allgather_object
from hvdtrain.errors import MismatchError

RATE = 0.4


class Rates(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        optimizer: Any = self.model.optimizer
        self.rates.append(float(keras.ops.convert_to_numpy(optimizer.learning_rate)))


def rates_of(*callbacks: Any, epochs: int = 4) -> tuple[list[float], Any]:
    model, recorder = shared_model(), Rates()
    model.optimizer.learning_rate = RATE
    history = fit(model, hvd.rank(), epochs=epochs, callbacks=[*callbacks, recorder])
    return recorder.rates, history.history


def learning_rates_follow_the_formulas() -> None:
    size = hvd.size()
    warmup = hvd.callbacks.LearningRateWarmupCallback(RATE, warmup_epochs=2)
    drop = hvd.callbacks.LearningRateScheduleCallback(RATE, 0.1, start_epoch=3)
    got, logs = rates_of(warmup, drop, epochs=5)
    growing = [RATE / size * (n / STEPS * (size - 1) / 2 + 1) for n in range(1, 2 * STEPS + 1)]
    want = [*growing, *[RATE] * 2 * STEPS, *[RATE * 0.1] * STEPS]
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert got[2 * STEPS - 1] == np.float32(RATE)
    np.testing.assert_allclose(logs["lr"], want[STEPS - 1 :: STEPS], rtol=1e-6)

    again = shared_model()
    warmup.set_model(again)
    warmup.set_params({"steps": 2 * STEPS})  # of another fit
    warmup.on_train_begin()
    warmup.on_epoch_begin(0)
    warmup.on_train_batch_begin(0)
    first = RATE / size * ((size - 1) / (4 * STEPS) + 1)
    np.testing.assert_allclose(float(again.optimizer.learning_rate), first, rtol=1e-6)

    smooth = hvd.callbacks.LearningRateScheduleCallback(
        RATE, lambda epoch: 1 / (1 + epoch), end_epoch=2, staircase=False, steps_per_epoch=STEPS
    )
    got, _ = rates_of(smooth, epochs=3)
    falling = [RATE / (1 + n / STEPS) for n in range(2 * STEPS)]
    np.testing.assert_allclose(got, falling + falling[-1:] * STEPS, rtol=1e-6)


class Slope(keras.layers.Layer):
    """Returns its only weight, of which the loss makes a gradient of 1."""

    def build(self, shape: Any) -> None:
        self.w = self.add_weight(shape=(), initializer="zeros", name="w")

    def call(self, inputs: Any) -> Any:
        return inputs * 0 + self.w


def velocities_are_corrected() -> None:
    """As with u = m u + g; w -= lr u, whose velocity does not hold the learning rate."""
    x = np.ones((STEPS, 1), np.float32)
    for nesterov in (False, True):
        model = keras.Sequential([keras.Input([1]), Slope()])
        optimizer = keras.optimizers.SGD(RATE, momentum=0.5, nesterov=nesterov)
        model.compile(
            hvd.DistributedOptimizer(optimizer), loss=lambda y, out: keras.ops.mean(out, axis=-1)
        )
        warmup = hvd.callbacks.LearningRateWarmupCallback(RATE, warmup_epochs=1)
        schedule = hvd.callbacks.LearningRateScheduleCallback(RATE, 0.1, start_epoch=1)
        recorder = Rates()
        callbacks = [warmup, schedule, recorder]
        model.fit(x, x, batch_size=1, epochs=3, verbose=0, callbacks=callbacks)
        u = w = 0.0
        for rate in recorder.rates:
            u = 0.5 * u + 1.0
            w -= rate * (0.5 * u + 1.0 if nesterov else u)
        np.testing.assert_allclose(keras.ops.convert_to_numpy(model.weights[0]), w, rtol=1e-5)


class Kinds(keras.callbacks.Callback):
    """Puts into the logs what callbacks may put there, other things on other ranks."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        rank = hvd.rank()
        last = rank == hvd.size() - 1
        logs |= {
            "own": f"rank {rank}",
            "none": None,
            "some": float(rank) if last else None,
            "nested": {"deep": keras.ops.full((2, 2), rank), "names": ["a", rank]},
            "list": [rank, 2 * rank],
            "yes": rank == 0,
            "complex": complex(rank, 1),
        }
        if last:
            logs["last"] = {"inner": np.float16(3)}


def softmax_model(features: int, metrics: list[Any]) -> Any:
    """Return a compiled model of which the output is softmax(input), and stays so."""
    layer = keras.layers.Dense(
        features, activation="softmax", kernel_initializer="identity", use_bias=False
    )
    model = keras.Sequential([keras.Input([features]), layer])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.0))
    model.compile(optimizer, loss="mse", metrics=metrics, run_eagerly=True)
    return model


def metrics_of_every_form_are_averaged() -> None:
    """Rank r has r + 1 batches of 2 samples; a vector is averaged element by element."""
    rank, size = hvd.rank(), hvd.size()
    keras.utils.set_random_seed(rank)
    model = softmax_model(3, [keras.metrics.F1Score()])
    rows = 2 * (rank + 1)
    x, y = np.random.rand(rows, 3).astype(np.float32), np.eye(3, dtype=np.float32)[rank % 3 :][:1]
    targets = np.repeat(y, rows, 0)
    held = (x, targets) if rank == 0 else None
    callbacks = [Kinds(), hvd.callbacks.MetricAverageCallback()]
    history = model.fit(
        *(x, targets), batch_size=2, verbose=0, validation_data=held, callbacks=callbacks
    ).history
    metric = keras.metrics.F1Score()
    metric.update_state(targets, keras.ops.softmax(x))
    every = np.stack(allgather_object(keras.ops.convert_to_numpy(metric.result())))
    weights = np.arange(size) + 1
    assert history["f1_score"][0].shape == (3,)
    want = np.average(every, axis=0, weights=weights)
    np.testing.assert_allclose(history["f1_score"][0], want, rtol=1e-6)
    np.testing.assert_allclose(history["val_f1_score"][0], every[0], rtol=1e-6)
    mean = np.average(np.arange(size), weights=weights)
    nested = history["nested"][0]
    np.testing.assert_allclose(nested["deep"], np.full((2, 2), mean))
    np.testing.assert_allclose(history["list"][0], [mean, 2 * mean])
    assert (nested["names"], history["own"][0]) == (["a", rank], f"rank {rank}")
    assert (history["none"], history["some"]) == ([None], [size - 1.0])
    np.testing.assert_allclose(history["yes"][0], weights[0] / weights.sum())
    np.testing.assert_allclose(history["complex"][0], complex(mean, 1))
    assert history["last"] == [{"inner": 3.0}]
    shared = allgather_object(
        {k: repr(v) for k, v in history.items() if k not in ("own", "nested")}
    )
    assert all(each == shared[0] for each in shared)


class Unequal(keras.callbacks.Callback):
    def __init__(self, values: tuple[Any, Any]) -> None:
        super().__init__()
        self._values = values

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["odd"] = self._values[hvd.rank() == hvd.size() - 1]


def metrics_of_different_forms_are_refused_on_all_ranks() -> None:
    if hvd.size() == 1:
        return
    for values, text in (
        (
            (np.zeros(3), np.zeros(4)),
            f"metric 'odd' has shape (4,) on rank {hvd.size() - 1}, but (3",
        ),
        (({"a": 1.0}, 2.0), "metric 'odd' is a number on"),
    ):
        model = softmax_model(1, [])
        callbacks = [Unequal(values), hvd.callbacks.MetricAverageCallback()]
        x = np.ones((2, 1), np.float32)
        with raising(MismatchError, text=text):
            model.fit(x, x, verbose=0, callbacks=callbacks)


def state_of_rank_0_is_broadcast() -> str:
    model = dense_model(seed=hvd.rank())
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)
    optimizer.iterations.assign(10 * (hvd.rank() + 1))
    model.compile(hvd.DistributedOptimizer(optimizer), loss="mse")
    bias = model.layers[-1].bias
    bias.assign([float(hvd.rank())] * 2)
    local = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[bias])
    model.optimizer.learning_rate = 0.0
    fit(model, hvd.rank(), epochs=1, callbacks=[local])
    assert int(model.optimizer.iterations) == 10 + STEPS
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(bias), [hvd.rank()] * 2)
    bias.assign([0.0, 0.0])
    return digest([*model.weights, *model.optimizer.variables])


def what_cannot_work_is_refused_at_the_start() -> None:
    model = shared_model()
    x, y = (array.reshape(-1, array.shape[-1]) for array in data())
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.1)

    def batches() -> Any:
        while True:
            yield x[:4], y[:4]

    with raising(ValueError, text="steps_per_epoch"):
        model.fit(batches(), callbacks=[warmup])
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    model = dense_model(seed=5)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(decay)), loss="mse")
    with raising(ValueError, text="learning rate schedule"):
        model.fit(x, y, STEPS, callbacks=[warmup])
    missing: Any = None
    with raising(ValueError, text="initial_lr"):
        hvd.callbacks.LearningRateScheduleCallback(missing, 0.1)


class SeesItsFile(keras.layers.Layer):
    """Records, while all ranks write their models, whether there is a file already."""

    path, seen = "", list[bool]()

    def call(self, inputs: Any) -> Any:
        return inputs

    def save_own_variables(self, store: Any) -> None:
        self.seen.append(Path(self.path).exists())
        allgather_object(None, "in the middle")
        store["0"] = np.zeros(1)


def checkpoints_of_all_ranks_in_one_file_leave_it_whole() -> None:
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2), SeesItsFile()])
    if hvd.rank() == 0:
        Path("latest.keras").symlink_to("named.keras")
    allgather_object(None, "linked")
    files = (("all.keras", False), ("all.weights.h5", True), ("latest.keras", False))
    for path, weights_only in files:
        SeesItsFile.path = path
        save = keras.callbacks.ModelCheckpoint(path, save_weights_only=weights_only)
        save.set_model(model)
        save.on_epoch_end(0, {})
        assert SeesItsFile.seen.pop() == (hvd.size() == 1)
        allgather_object(None, "saved")
        assert path in os.listdir()
        assert not list(Path().glob(".unfinished-*"))
        allgather_object(None, "seen")
    assert Path("latest.keras").is_symlink()
    assert Path("named.keras").is_file()
