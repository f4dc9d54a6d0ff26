"""The built-in recipes for torch: their networks, for which a split batch is a whole one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_files import write_cifar10, write_images, write_mnist

from hvdtrain.data import sample_generator
from hvdtrain.data.dataset import Samples
from hvdtrain.errors import UsageError
from hvdtrain.train.metrics import Accuracy
from hvdtrain.train.recipes.builtin import (
    cifar10,
    digits,
    imagefolder,
    mapfile,
    mnist,
    synthetic,
    text,
)
from hvdtrain.train.recipes.recipe import Recipe


def images(folder: Path) -> None:
    names = [f"{part}/{name}.png" for part in ("train", "test") for name in ("a/0", "a/1", "b/0")]
    write_images([folder / name for name in names])
    for part in ("train", "test"):
        rows = [f"{part}/{name}.png\t{label}\n" for name, label in (("a/0", 2), ("b/0", 0))]
        (folder / f"{part}.txt").write_text("".join(rows))


def samples_of(recipe: Recipe, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    data = recipe.train
    rows = zip(data.inputs, data.labels, strict=True) if isinstance(data, Samples) else data
    inputs, targets = zip(*(row for row, _ in zip(rows, range(count), strict=False)), strict=True)
    if recipe.augment is not None:
        inputs = tuple(
            recipe.augment(one, sample_generator(0, 0, index)) for index, one in enumerate(inputs)
        )
    # Weights are in float64, so that only the order of sums can make a difference.
    batch = torch.from_numpy(np.stack(inputs))
    return batch.double() if batch.is_floating_point() else batch, torch.tensor(np.stack(targets))


def gradient(recipe: Recipe, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    recipe.model.zero_grad()
    recipe.loss(recipe.model(inputs), targets).backward()
    return torch.cat([parameter.grad.flatten() for parameter in recipe.model.parameters()])


CASES: list[tuple[Callable[[Path], Recipe], tuple[int, ...], int]] = [
    # What makes it, the shape of the scores of two samples, the number of parameters.
    (lambda _: digits.recipe(), (2, 10), 38282),
    # That of the example of PyTorch has as many.
    (lambda folder: mnist.recipe(folder / "mnist"), (2, 10), 1199882),
    (lambda folder: cifar10.recipe(folder / "cifar10", width=4), (2, 10), 17534),
    (lambda folder: imagefolder.recipe(folder, width=4, size=48, crop=40), (2, 2), 44838),
    (lambda folder: mapfile.recipe(folder, width=4, size=48, crop=40, blocks=1), (2, 3), 20151),
    (lambda folder: text.recipe(folder / "text", context=9, width=8), (2, 5, 9), 1917),
    (lambda _: synthetic.recipe(samples=8), (2, 10), 78042),
    (lambda _: synthetic.recipe("7", classes=3, samples=8), (2, 3), 68611),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name in ("mnist", "cifar10", "text"):
        (folder / name).mkdir()
    write_mnist(folder / "mnist", train=4, test=2)
    write_cifar10(folder / "cifar10", 2, python=False)
    (folder / "text" / "a.txt").write_text("abcd\n" * 40)
    images(folder)
    return folder


@pytest.mark.parametrize(("make", "shape", "parameters"), CASES)
def test_networks(
    folder: Path, make: Callable[[Path], Recipe], shape: tuple[int, ...], parameters: int
) -> None:
    torch.manual_seed(0)
    recipe = make(folder)
    assert sum(parameter.numel() for parameter in recipe.model.parameters()) == parameters
    recipe.model.double()
    for module in recipe.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    inputs, targets = samples_of(recipe, 2)
    assert recipe.model(inputs).shape == shape
    assert isinstance(recipe.metrics["accuracy"], Accuracy)
    whole = gradient(recipe, inputs, targets)
    parts = [gradient(recipe, inputs[i : i + 1], targets[i : i + 1]) for i in range(2)]
    assert whole.abs().max() > 0
    torch.testing.assert_close(whole, (parts[0] + parts[1]) / 2, rtol=1e-9, atol=1e-12)
    tested = recipe.test.inputs[0] if isinstance(recipe.test, Samples) else recipe.test[0][0]
    assert tested.shape == inputs[0].shape
    assert recipe.classes is None or len(recipe.classes) == shape[1]


def test_files_to_predict_from(folder: Path) -> None:
    numbers = mnist.recipe(folder / "mnist")
    inputs = numbers.read(folder / "mnist" / "t10k-images-idx3-ubyte")  # type: ignore[misc]
    assert np.array_equal(inputs, numbers.test.inputs)
    photographs = imagefolder.recipe(folder, size=48, crop=40)
    inputs = photographs.read(photographs.test.paths[1])  # type: ignore[misc]
    assert np.array_equal(inputs, photographs.test[1][0][None])
    small = cifar10.recipe(folder / "cifar10").read
    assert small is not None
    assert small(photographs.test.paths[1]).shape == (1, 3, 32, 32)


def test_label_smoothing() -> None:
    scores, labels = torch.tensor([[2.0, 0.0, 1.0]]), torch.tensor([0])
    logs = scores.log_softmax(1)[0]
    expected = -0.7 * logs[0] - 0.3 * logs.mean()
    torch.testing.assert_close(digits.recipe(0.3).loss(scores, labels), expected)


@pytest.mark.parametrize(
    ("function", "arguments", "fault"),
    [
        (digits.recipe, {"label_smoothing": 1.0}, "label_smoothing must be .* below 1, got 1.0"),
        (imagefolder.recipe, {"size": 8, "crop": 9}, "crop must be from 1 to size, got crop 9"),
        (synthetic.recipe, {"shape": "3x32"}, "shape must be like 3x32x32 or 100, got '3x32'"),
        (synthetic.recipe, {"shape": "axb"}, "shape must be like 3x32x32 or 100, got 'axb'"),
        (synthetic.recipe, {"shape": "0"}, "shape must be at least 1, got 0"),
        (mnist.recipe, {}, "mnist needs --data-dir DIR, with train-images-idx3-ubyte"),
    ],
)
def test_bad_arguments(
    function: Callable[..., Recipe], arguments: dict[str, Any], fault: str
) -> None:
    with pytest.raises(UsageError, match=fault):
        function(**arguments)


def test_heads_must_share_the_width(folder: Path) -> None:
    with pytest.raises(UsageError, match="width must be a multiple of heads, got 10 and 4"):
        text.recipe(folder / "text", context=9, width=10)
