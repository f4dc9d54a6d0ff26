"""The network of point_recipes.py in Keras."""

import keras
from point_recipes import CLASSES, points

from hvdtrain.train import Recipe


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
