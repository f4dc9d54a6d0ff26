"""The network of point_recipes.py in Keras."""

from dataclasses import replace
from typing import Any

import keras
from point_recipes import CLASSES, points

from hvdtrain.train import Callback, CallbackState, Recipe


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


def swapping() -> Recipe:
    return replace(recipe(), callbacks=[keras.callbacks.SwapEMAWeights()])


class Breaking(keras.layers.Layer):
    def call(self, rows: Any, training: bool = False) -> Any:
        return keras.ops.matmul(rows, keras.ops.ones([5, CLASSES])) if training else rows


def breaking() -> Recipe:
    return replace(recipe(), model=keras.Sequential([keras.Input([6]), Breaking()]))
