"""MNIST, and other data sets in its IDX files."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hvdtrain.data.dataset import Dataset, Samples
from hvdtrain.data.files import data_folder, missing_files, read_bytes
from hvdtrain.data.images import standardized
from hvdtrain.errors import UsageError

_UNSIGNED_BYTE = 0x08
_PIXELS = 28
_CLASSES = 10
# Mean and standard deviation of the training images, between 0 and 1.
_MEAN, _DEVIATION = 0.1307, 0.3081
_LAYOUT = (
    "train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and "
    "t10k-labels-idx1-ubyte, also as train-images.idx3-ubyte and so on, each with .gz or without"
)


def load_mnist(data_dir: Path | None) -> Dataset:
    """Load the images, standardized float32 [n, 1, 28, 28], and labels from 0 to 9.

    Args:
        data_dir: folder with the four files of MNIST, or of Fashion-MNIST.

    Raises:
        UsageError: a file is missing, is damaged, or does not fit the others.
    """
    folder = data_folder(data_dir, "mnist", _LAYOUT)
    stems = {f"{part}-{kind}": kind for part in ("train", "t10k") for kind in ("images", "labels")}
    found = {stem: _find(folder, stem, kind) for stem, kind in stems.items()}
    missing = [f"{stem}-{_ending(stems[stem])}" for stem, path in found.items() if path is None]
    if missing:
        raise missing_files("mnist", folder, missing, _LAYOUT)
    paths = {stem: path for stem, path in found.items() if path is not None}
    return Dataset(
        _samples(paths["train-images"], paths["train-labels"]),
        _samples(paths["t10k-images"], paths["t10k-labels"]),
    )


def read_idx(path: Path, dimensions: int) -> npt.NDArray[np.uint8]:
    """Return the array of unsigned bytes in an IDX file, gzipped or not.

    Args:
        path: path of the file.
        dimensions: number of dimensions that the array must have.

    Raises:
        UsageError: it is not such a file, or its size differs from what its header says.
    """
    content = read_bytes(path)
    header = bytes([0, 0, _UNSIGNED_BYTE, dimensions])
    start = len(header) + 4 * dimensions
    if content[: len(header)] != header:
        raise UsageError(
            f"{path} is not an IDX file of unsigned bytes with {dimensions} dimensions: it begins "
            f"with {content[: len(header)].hex(' ') or 'nothing'}, not {header.hex(' ')}"
        )
    if len(content) < start:
        raise UsageError(f"{path} is truncated: it ends after {len(content)} bytes, in its header")
    shape = struct.unpack(f">{dimensions}I", content[len(header) : start])
    expected = start + math.prod(shape)
    if len(content) != expected:
        fault = "is truncated" if len(content) < expected else "is longer than its header says"
        raise UsageError(f"{path} {fault}: got {len(content)} bytes, expected {expected}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _samples(images_path: Path, labels_path: Path) -> Samples:
    images, labels = read_mnist_images(images_path), read_idx(labels_path, 1)
    if len(images) != len(labels):
        raise UsageError(
            f"{images_path} has {len(images)} images, but {labels_path} has {len(labels)} labels"
        )
    if not images.size:
        raise UsageError(f"{images_path} has no images")
    if labels.max() >= _CLASSES:
        row = int(np.argmax(labels >= _CLASSES))
        raise UsageError(f"{labels_path}: label {labels[row]} of image {row} is not from 0 to 9")
    return Samples(images, labels.astype(np.int64))


def read_mnist_images(path: Path) -> npt.NDArray[np.float32]:
    """Return the images in one file of MNIST, float32 [n, 1, 28, 28], as load_mnist() does.

    Raises:
        UsageError: it is not such a file, or is damaged.
    """
    images = read_idx(path, 3)
    if images.shape[1:] != (_PIXELS, _PIXELS):
        height, width = images.shape[1:]
        raise UsageError(f"{path} has images of {height} x {width} pixels, expected 28 x 28")
    return standardized(images[:, None], _MEAN, _DEVIATION)


def _find(folder: Path, stem: str, kind: str) -> Path | None:
    names = [f"{stem}{mark}{_ending(kind)}{packed}" for mark in "-." for packed in ("", ".gz")]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _ending(kind: str) -> str:
    return "idx3-ubyte" if kind == "images" else "idx1-ubyte"
