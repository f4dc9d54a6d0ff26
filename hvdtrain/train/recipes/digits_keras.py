"""The network of digits.py in Keras."""

from __future__ import annotations

from typing import Any

import keras

from hvdtrain.data.digits import load_digits
from hvdtrain.train.keras_recipe import KerasRecipe
from hvdtrain.train.options import SGD_MOMENTUM

__all__ = ["recipe"]


def _build_model() -> Any:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input([1, 8, 8]),
            layers.Reshape([8, 8, 1], name="channels_last"),
            layers.Conv2D(16, 3, padding="same", activation="relu", name="conv_1"),
            layers.Conv2D(32, 3, padding="same", activation="relu", name="conv_2"),
            layers.MaxPooling2D(2, name="pool"),
            layers.Flatten(name="flat"),
            layers.Dense(64, activation="relu", name="dense"),
            layers.Dense(10, name="scores"),
        ],
        name="digits",
    )


def _build_loss() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")


def _build_optimizer(name: str, lr: Any) -> Any:
    if name == "adam":
        return keras.optimizers.Adam(lr, epsilon=1e-8, name="optimizer")
    return keras.optimizers.SGD(lr, momentum=SGD_MOMENTUM, name="optimizer")


recipe = KerasRecipe(
    name="digits",
    load_data=load_digits,
    build_model=_build_model,
    build_loss=_build_loss,
    build_optimizer=_build_optimizer,
    most_threads=1,
)
