"""A convolutional network on images in map files, as CNTK trains it, with its two learners."""

from __future__ import annotations

import argparse
from pathlib import Path

from torch import nn

import hvdtrain.torch as hvd
from hvdtrain.data.dataset import Samples
from hvdtrain.data.digits import load_digits
from hvdtrain.data.images import require_pillow
from hvdtrain.data.map_file import load_map_files
from hvdtrain.train import Recipe, fit
from hvdtrain.train.metrics import Accuracy

parser = argparse.ArgumentParser()
parser.add_argument("--data-dir", type=Path, help="with train.txt and test.txt; default: digits")
parser.add_argument("--pixels", type=int, default=8, help="of a side, after resizing")
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--batch-size", type=int, default=64, help="over all ranks")
parser.add_argument("--bits", type=int, choices=(1, 2, 4, 8, 32), default=1, help="between hosts")
parser.add_argument("--warm-up", type=int, default=2000, help="samples with all bits at first")
parser.add_argument("--block-size", type=int, help="samples: block momentum, in place of bits")
parser.add_argument("--out", type=Path, default=Path("cntk-convnet"))


class ConvNet(nn.Sequential):
    """Two stages of two convolutions and a pool, then two layers with dropout between them."""

    def __init__(self, classes: int) -> None:
        super().__init__(
            *(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()),
            *(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveMaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Dropout(0.25)),
            nn.Linear(64, classes),
        )


def recipe(data_dir: Path, pixels: int = 8) -> Recipe:
    """Return the network, its data and its loss, for `fit` or for `python -m hvdtrain train`."""
    train, test = load_map_files(data_dir, size=pixels, crop=pixels)
    return Recipe(
        model=ConvNet(len(train.classes)),
        train=train,
        test=test,
        loss=nn.functional.cross_entropy,
        metrics={"accuracy": Accuracy()},
        classes=train.classes,
    )


def write_digits(folder: Path) -> Path:
    """Write the digits as image files with map files; return their folder (collective)."""
    if hvd.rank() == 0:
        data = load_digits()
        write_images(data.train, folder, "train")
        write_images(data.test, folder, "test")
    hvd.barrier()
    return folder


def write_images(samples: Samples, folder: Path, name: str) -> None:
    (folder / name).mkdir(parents=True, exist_ok=True)
    lines = []
    for index, (image, label) in enumerate(zip(samples.inputs, samples.labels, strict=True)):
        pixels = (image[0] * 255).astype("uint8")
        require_pillow().fromarray(pixels).save(folder / name / f"{index}.png")
        lines.append(f"{name}/{index}.png\t{label}\n")
    (folder / f"{name}.txt").write_text("".join(lines))


if __name__ == "__main__":
    arguments = parser.parse_args()
    hvd.init()
    if arguments.block_size:
        exchange = f"blockmomentum:block={arguments.block_size}"
    elif arguments.bits < 32:
        exchange = f"nbit:bits={arguments.bits},distributed_after={arguments.warm_up}"
    else:
        exchange = "average"
    summary = fit(
        recipe,
        set={"pixels": arguments.pixels},
        data_dir=arguments.data_dir or write_digits(arguments.out / "images"),
        epochs=arguments.epochs,
        global_batch_size=arguments.batch_size,
        lr=0.02,
        lr_scaling="none",
        momentum=0.9,
        exchange=exchange,
        out=arguments.out / "run",
        resume="auto",
    )
    assert summary is not None  # no signal has stopped it
    accuracy = summary.final["accuracy"]
    if hvd.rank() == 0:
        print(f"test accuracy {accuracy:.2%} on {hvd.size()} ranks")
