"""The network of PyTorch's basic MNIST example, on MNIST or files in the same format."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from hvdtrain.data.idx import load_mnist, read_mnist_images
from hvdtrain.train.metrics import Accuracy
from hvdtrain.train.recipe import Recipe
from hvdtrain.train.recipes.parts import cross_entropy


def recipe(data_dir: Path | None = None, label_smoothing: float = 0.0, width: int = 32) -> Recipe:
    """Return the network for images [n, 1, 28, 28]."""
    data = load_mnist(data_dir)
    model = nn.Sequential(
        nn.Conv2d(1, width, 3),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(2 * width * 12 * 12, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    )
    return Recipe(
        model=model,
        train=data.train,
        test=data.test,
        loss=cross_entropy(label_smoothing),
        metrics={"accuracy": Accuracy()},
        read=read_mnist_images,
        classes=[str(digit) for digit in range(10)],
    )
