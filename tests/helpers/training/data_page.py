"""Loops with samplers on pages, and what they must come to."""

from pathlib import Path
from typing import Any

import numpy as np
from page_blocks import ROOT, blocks

from hvdtrain.data.sampling import epoch_permutation

PAGE = ROOT / "docs" / "data.md"


def run_block(word: str, page: Path = PAGE) -> dict[str, Any]:
    (block,) = [block for block in blocks(page, "python") if word in block]
    names: dict[str, Any] = {}
    exec(compile(block, f"{page}: {word}", "exec"), names)
    return names


def trained(first: list[Any], inputs: Any, targets: Any) -> list[Any]:
    """Return weights [4, 1] and bias [1] after three epochs of SGD with whole batches of 64."""
    weights, bias = (np.asarray(array, np.float64) for array in first)
    for epoch in range(3):
        order = epoch_permutation(len(inputs), 1, epoch)
        for start in range(0, len(order), 64):
            rows = order[start : start + 64]
            errors = inputs[rows] @ weights + bias - targets[rows]
            weights = weights - 0.02 * 2 * inputs[rows].T @ errors / len(rows)
            bias = bias - 0.02 * 2 * errors.mean(axis=0)
    return [weights, bias]


def check_keras_loop(word: str, page: Path = PAGE) -> list[Any]:
    """Run a block whose model is one of Keras; return its weights, once they are right."""
    import keras

    names = run_block(word, page)
    keras.utils.set_random_seed(0)
    first = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)]).get_weights()
    expected = trained(first, names["inputs"], names["targets"])
    weights: list[Any] = names["model"].get_weights()
    for got, wanted in zip(weights, expected, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-5)
    return weights
