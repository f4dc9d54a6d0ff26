"""The network of digits.py in Keras."""

from __future__ import annotations

import keras

from hvdtrain.data.digits import load_digits
from hvdtrain.train.recipe import Recipe
from hvdtrain.train.recipes.losses_keras import cross_entropy


def recipe(label_smoothing: float = 0.0) -> Recipe:
    """Return the network for images [n, 1, 8, 8], and the data that comes with scikit-learn."""
    data = load_digits()
    layers = keras.layers
    model = keras.Sequential(
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
    return Recipe(
        model=model,
        train=data.train,
        test=data.test,
        loss=cross_entropy(label_smoothing),
        metrics={"accuracy": keras.metrics.SparseCategoricalAccuracy(name="accuracy")},
        classes=[str(digit) for digit in range(10)],
        most_threads=1,
    )
