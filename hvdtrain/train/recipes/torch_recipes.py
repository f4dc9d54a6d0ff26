"""The built-in recipes of torch.

Residual networks normalize groups of channels within each sample (Wu and He, arXiv:1803.08494), and
the network for digits has neither dropout nor batch normalization: the gradient of a batch is the
mean over its samples, however the batch is split between ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvdtrain.data.augment import crop_and_flip
from hvdtrain.data.characters import load_text
from hvdtrain.data.cifar10 import CLASSES, load_cifar10
from hvdtrain.data.dataset import make_synthetic
from hvdtrain.data.digits import load_digits
from hvdtrain.data.idx import load_mnist, read_mnist_images
from hvdtrain.data.image_folder import load_image_folders
from hvdtrain.data.images import ImageFiles, read_image, require_pillow
from hvdtrain.data.map_file import load_map_files
from hvdtrain.errors import UsageError
from hvdtrain.train.metrics import Accuracy
from hvdtrain.train.recipe import Recipe


def cross_entropy(label_smoothing: float) -> Callable[..., torch.Tensor]:
    """Return the mean cross entropy of scores [n, classes, ...] and labels [n, ...]."""
    if not 0 <= label_smoothing < 1:
        raise UsageError(f"label_smoothing must be at least 0 and below 1, got {label_smoothing}")
    return partial(torch.nn.functional.cross_entropy, label_smoothing=label_smoothing)


_GROUPS = 8
_DIGITS = [str(digit) for digit in range(10)]


def resnet(
    classes: int, width: int, stages: int, blocks: int, channels: int = 3, large: bool = False
) -> nn.Module:
    """Return a network that maps images [n, channels, height, width] to scores [n, classes]."""
    if large:
        stem = [_convolution(channels, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
    else:
        stem = [_convolution(channels, width, 3, 1), nn.ReLU()]
    body: list[nn.Module] = []
    inputs = width
    for stage in range(stages):
        outputs = width << stage
        for number in range(blocks):
            body.append(_Block(inputs, outputs, 2 if stage and not number else 1))
            inputs = outputs
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]
    return nn.Sequential(*stem, *body, *head)


def _convolution(inputs: int, outputs: int, size: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False),
        nn.GroupNorm(math.gcd(_GROUPS, outputs), outputs),
    )


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = _convolution(inputs, outputs, 3, stride)
        self.second = _convolution(outputs, outputs, 3, 1)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else _convolution(inputs, outputs, 1, stride)

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(images))) + self.shortcut(images))


def _classifier(model: nn.Module, data: Any, label_smoothing: float, **others: Any) -> Recipe:
    loss, metrics = cross_entropy(label_smoothing), {"accuracy": Accuracy()}
    return Recipe(model, data.train, loss, data.test, metrics=metrics, **others)


def digits(label_smoothing: float = 0.0) -> Recipe:
    """Return a network for images [n, 1, 8, 8], and the data that comes with scikit-learn."""
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
    return _classifier(model, load_digits(), label_smoothing, classes=_DIGITS, most_threads=1)


def mnist(data_dir: Path | None = None, label_smoothing: float = 0.0, width: int = 32) -> Recipe:
    """Return the network of PyTorch's basic MNIST example, for images [n, 1, 28, 28]."""
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
    return _classifier(model, data, label_smoothing, read=read_mnist_images, classes=_DIGITS)


def cifar10(
    data_dir: Path | None = None, label_smoothing: float = 0.0, width: int = 16, blocks: int = 3
) -> Recipe:
    """Return a network for images [n, 3, 32, 32], which are shifted and flipped in training."""
    data = load_cifar10(data_dir)
    return _classifier(
        resnet(len(CLASSES), width, stages=3, blocks=blocks),
        data,
        label_smoothing,
        augment=partial(crop_and_flip, size=32, padding=4),
        read=partial(_read_batch_of_one, size=32),
        classes=CLASSES,
    )


def synthetic(
    shape: str = "3x32x32",
    classes: int = 10,
    samples: int = 4096,
    data_seed: int = 0,
    width: int = 16,
    label_smoothing: float = 0.0,
) -> Recipe:
    """Return a network for inputs [n, *shape], and synthetic data."""
    parts = shape.split("x")
    if len(parts) not in (1, 3) or not all(part.isascii() and part.isdigit() for part in parts):
        raise UsageError(f"shape must be like 3x32x32 or 100, got {shape!r}")
    numbers = list(map(int, parts))
    data = make_synthetic(samples, numbers, classes, data_seed)
    if len(numbers) == 1:
        hidden = 16 * width
        layers = [nn.Linear(numbers[0], hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()]
        model: nn.Module = nn.Sequential(*layers, nn.Linear(hidden, classes))
    else:
        model = resnet(classes, width, stages=3, blocks=1, channels=numbers[0])
    return _classifier(model, data, label_smoothing)


def _photographs(
    load: Callable[[Path | None, int, int], tuple[ImageFiles, ImageFiles]],
) -> Callable[..., Recipe]:
    """Return a recipe for photographs, which are cropped and flipped in training."""

    def recipe(
        data_dir: Path | None = None,
        label_smoothing: float = 0.0,
        width: int = 32,
        blocks: int = 2,
        size: int = 144,
        crop: int = 128,
    ) -> Recipe:
        """Return a residual network for color images [n, 3, crop, crop]."""
        require_pillow()
        if not 1 <= crop <= size:
            raise UsageError(f"crop must be from 1 to size, got crop {crop} and size {size}")
        train, test = load(data_dir, size, crop)
        return Recipe(
            model=resnet(len(train.classes), width, stages=4, blocks=blocks, large=True),
            train=train,
            test=test,
            loss=cross_entropy(label_smoothing),
            metrics={"accuracy": Accuracy()},
            augment=partial(crop_and_flip, size=crop),
            read=partial(_read_batch_of_one, size=size, crop=crop),
            classes=train.classes,
        )

    return recipe


def _read_batch_of_one(path: Path, size: int, crop: int | None = None) -> npt.NDArray[np.float32]:
    return read_image(path, size, crop)[None]


imagefolder = _photographs(load_image_folders)
mapfile = _photographs(load_map_files)


class Transformer(nn.Module):
    """Predicts scores for the token that follows each token of a window.

    It is decoder-only (Vaswani et al., arXiv:1706.03762), with pre-normalization.
    """

    def __init__(self, vocabulary: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise UsageError(f"width must be a multiple of heads, got {width} and {heads}")
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(context, width)
        self.layers = nn.Sequential(*(_TransformerLayer(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores [n, vocabulary, length] for tokens [n, length]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.layers(self.tokens(tokens) + self.places(positions))
        scores: Tensor = self.head(self.norm(hidden))
        # torch's losses and metrics expect the classes in dimension 1.
        return scores.transpose(1, 2)


class _TransformerLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.think = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self._attention(self.norm_1(hidden))
        change: Tensor = self.think(self.norm_2(hidden))
        return hidden + change

    def _attention(self, hidden: Tensor) -> Tensor:
        count, length, width = hidden.shape
        # [n, length, 3 * width] -> three times [n, heads, length, width / heads]
        parts = self.attend(hidden).view(count, length, 3, self._heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        projected: Tensor = self.project(mixed.transpose(1, 2).reshape(count, length, width))
        return projected


def text(
    data_dir: Path | None = None,
    file: str = "",
    context: int = 64,
    width: int = 64,
    layers: int = 2,
    heads: int = 4,
    label_smoothing: float = 0.0,
) -> Recipe:
    """Return a network that maps characters [n, context] to scores of the character after each."""
    text = load_text(data_dir, context, file)
    return Recipe(
        model=Transformer(len(text.vocabulary), context, width, layers, heads),
        train=text.train,
        test=text.test,
        loss=cross_entropy(label_smoothing),
        metrics={"accuracy": Accuracy()},
        classes=text.vocabulary,
    )
