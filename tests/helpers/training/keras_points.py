"""The network of point_recipes.py in Keras."""

from dataclasses import replace
from typing import Any

import keras
import numpy as np
from point_recipes import CLASSES, points

from hvdtrain.data import Samples
from hvdtrain.train import (
    Callback,
    CallbackState,
    LearningRateMonitor,
    Recipe,
    RestoreBestWeights,
)


def recipe() -> Recipe:
    layers = keras.layers
    return Recipe(
        model=keras.Sequential(
            [keras.Input([6]), layers.Dense(8, activation="tanh"), layers.Dense(CLASSES)]
        ),
        train=points(203, 0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        test=points(301, 1),
        metrics={"accuracy": keras.metrics.SparseCategoricalAccuracy()},
    )


class Checking(Callback):
    def on_epoch_end(self, state: CallbackState) -> None:
        assert state.step == 7 * state.epoch
        assert set(state.train) == set(state.test) == {"loss", "accuracy"}


def stopped() -> Recipe:
    early = keras.callbacks.EarlyStopping(
        "val_loss", mode="max", patience=2, restore_best_weights=True
    )
    return replace(recipe(), callbacks=[early, Checking()])


class Valley(keras.losses.Loss):
    """The weight for samples of label 0, which loses the rate in each step; (weight + 0.42)²."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        square = keras.ops.square(y_pred + 0.42)
        return keras.ops.where(keras.ops.cast(y_true, bool)[:, None], square, y_pred)


class Rates(LearningRateMonitor):
    def on_train_end(self, state: CallbackState) -> None:
        assert (self.steps[-1], self.lrs) == (state.step, {"lr": [0.125] * len(self.steps)})


def valley() -> Recipe:
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    train, test = (
        Samples(np.ones((n, 1), np.float32), np.full(n, label)) for n, label in ((12, 0), (5, 1))
    )
    callbacks = [RestoreBestWeights(), Rates()]
    return Recipe(
        keras.Sequential([keras.Input([1]), layer]), train, Valley(), test, callbacks=callbacks
    )


def swapping() -> Recipe:
    return replace(recipe(), callbacks=[keras.callbacks.SwapEMAWeights()])


class Breaking(keras.layers.Layer):
    def call(self, rows: Any, training: bool = False) -> Any:
        return keras.ops.matmul(rows, keras.ops.ones([5, CLASSES])) if training else rows


def breaking() -> Recipe:
    return replace(recipe(), model=keras.Sequential([keras.Input([6]), Breaking()]))
