"""`fit` with the samplers of hvdtrain.data, and the recipes for Keras."""

from __future__ import annotations

import tempfile
from pathlib import Path

import keras
import numpy as np
from data_files import write_mnist
from data_page import check_keras_loop
from keras_optimizer_cases import digest


def the_loop_of_the_data_page() -> str:
    return digest(check_keras_loop("import hvdtrain.keras"))


def recipes_build_their_models_and_losses() -> None:
    if keras.backend.backend() != "torch":  # which the module of recipes imports in any case
        return
    from hvdtrain.train.recipes.builtin import digits_keras, mnist_keras

    with tempfile.TemporaryDirectory() as folder:
        write_mnist(Path(folder), train=3, test=2)
        recipes = [digits_keras.recipe(0.1), mnist_keras.recipe(Path(folder), 0.1, width=2)]
        plain = mnist_keras.recipe(Path(folder), width=2)
    for recipe in recipes:
        scores = keras.ops.convert_to_numpy(recipe.model(recipe.train.inputs[:3]))
        assert scores.shape == (3, 10)
        labels = recipe.train.labels[:3]
        logs = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
        losses = -logs[np.arange(3), labels]
        smoothed = 0.9 * losses - 0.1 * logs.mean(axis=1)
        for loss, expected in ((plain.loss, losses), (recipe.loss, smoothed)):
            got = keras.ops.convert_to_numpy(loss(labels, scores))
            np.testing.assert_allclose(got, expected.sum(), rtol=1e-5)
