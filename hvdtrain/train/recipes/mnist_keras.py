"""The network of mnist.py in Keras."""

from __future__ import annotations

from pathlib import Path

import keras

from hvdtrain.data.idx import load_mnist, read_mnist_images
from hvdtrain.train.recipe import Recipe
from hvdtrain.train.recipes.losses_keras import cross_entropy


def recipe(data_dir: Path | None = None, label_smoothing: float = 0.0, width: int = 32) -> Recipe:
    """Return the network for images [n, 1, 28, 28]."""
    data = load_mnist(data_dir)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input([1, 28, 28]),
            layers.Reshape([28, 28, 1], name="channels_last"),
            layers.Conv2D(width, 3, activation="relu", name="conv_1"),
            layers.Conv2D(2 * width, 3, activation="relu", name="conv_2"),
            layers.MaxPooling2D(2, name="pool"),
            layers.Dropout(0.25, name="dropout_1"),
            layers.Flatten(name="flat"),
            layers.Dense(128, activation="relu", name="dense"),
            layers.Dropout(0.5, name="dropout_2"),
            layers.Dense(10, name="scores"),
        ],
        name="mnist",
    )
    return Recipe(
        model=model,
        train=data.train,
        test=data.test,
        loss=cross_entropy(label_smoothing),
        metrics={"accuracy": keras.metrics.SparseCategoricalAccuracy(name="accuracy")},
        read=read_mnist_images,
        classes=[str(digit) for digit in range(10)],
    )
