"""A small convolutional network on scikit-learn's digits.

It has neither dropout nor batch normalization: its gradient is a plain mean over samples, so that
any number of ranks gets the weights that one rank gets.
"""

from __future__ import annotations

from torch import nn

from hvdtrain.data.digits import load_digits
from hvdtrain.train.metrics import Accuracy
from hvdtrain.train.recipe import Recipe
from hvdtrain.train.recipes.parts import cross_entropy


def recipe(label_smoothing: float = 0.0) -> Recipe:
    """Return the network for images [n, 1, 8, 8], and the data that comes with scikit-learn."""
    data = load_digits()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    return Recipe(
        model=model,
        train=data.train,
        test=data.test,
        loss=cross_entropy(label_smoothing),
        metrics={"accuracy": Accuracy()},
        classes=[str(digit) for digit in range(10)],
        most_threads=1,
    )
