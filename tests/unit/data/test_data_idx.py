"""MNIST's files: all ways in which they may be named and packed, and be wrong."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from data_files import idx, write_mnist

from hvdtrain.data.idx import load_mnist, read_idx, read_mnist_images
from hvdtrain.errors import UsageError


@pytest.mark.parametrize("mark", "-.")
@pytest.mark.parametrize("packed", [False, True])
def test_names_and_values(tmp_path: Path, mark: str, packed: bool) -> None:
    images, labels = write_mnist(tmp_path, train=6, test=3, mark=mark, packed=packed)
    data = load_mnist(tmp_path)
    assert data.train.inputs.shape == (6, 1, 28, 28)
    assert data.train.inputs.dtype == np.float32
    assert data.test.labels.tolist() == labels[6:].tolist()
    expected = (images[:6, None] / 255 - 0.1307) / 0.3081
    assert np.allclose(data.train.inputs, expected, atol=1e-6)
    (file,) = tmp_path.glob("t10k-images*")
    assert np.array_equal(read_mnist_images(file), data.test.inputs)


def test_where_files_are_expected(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as none:
        load_mnist(None)
    layout = "train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte"
    assert str(none.value).startswith(f"mnist needs --data-dir DIR, with {layout}")
    with pytest.raises(UsageError, match=f"there is no folder {tmp_path}/x; .*{layout}"):
        load_mnist(tmp_path / "x")
    write_mnist(tmp_path, train=2, test=2)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    (tmp_path / IMAGES_FILE).unlink()
    with pytest.raises(UsageError) as two:
        load_mnist(tmp_path)
    missing = "train-images-idx3-ubyte, t10k-labels-idx1-ubyte not found in"
    assert str(two.value).startswith(f"mnist: {missing} {tmp_path}; expected {layout}")
    assert str(two.value).endswith("nothing is downloaded")
    assert "\n" not in str(two.value)


IMAGES_FILE, LABELS_FILE = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
IMAGES = np.zeros((2, 28, 28), np.uint8)


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        (IMAGES_FILE, idx(IMAGES)[:-5], "is truncated: got 1579 bytes, expected 1584"),
        (IMAGES_FILE, idx(IMAGES) + b"x", "is longer than its header says: got 1585"),
        (IMAGES_FILE, idx(IMAGES)[:9], "ends after 9 bytes, in its header"),
        (IMAGES_FILE, b"", "with 3 dimensions: it begins with nothing"),
        (IMAGES_FILE, b"<html>", "begins with 3c 68 74 6d, not 00 00 08 03"),
        (LABELS_FILE, idx(IMAGES), "begins with 00 00 08 03, not 00 00 08 01"),
        (
            IMAGES_FILE,
            idx(IMAGES)[:4] + struct.pack(">3I", *[2**32 - 1] * 3),
            "is truncated: got 16 bytes, expected 79228162458924105385300197391",
        ),
        (IMAGES_FILE, idx(IMAGES[:, 1:]), "has images of 27 x 28 pixels"),
        (LABELS_FILE, idx(np.zeros(3, np.uint8)), "has 2 images, but .* 3 labels"),
        (IMAGES_FILE, idx(IMAGES[:1]), "has 1 images, but .* 2 labels"),
        ("t10k-labels-idx1-ubyte", idx(np.array([9, 10], np.uint8)), "label 10 of image 1 is not"),
    ],
)
def test_damaged_files(tmp_path: Path, name: str, content: bytes, fault: str) -> None:
    write_mnist(tmp_path, train=2, test=2)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=fault) as error:
        load_mnist(tmp_path)
    assert str(tmp_path / name) in str(error.value)


def test_no_images(tmp_path: Path) -> None:
    write_mnist(tmp_path, train=0, test=1)
    with pytest.raises(UsageError, match="train-images-idx3-ubyte has no images"):
        load_mnist(tmp_path)


@pytest.mark.parametrize(
    ("cut", "fault"), [(slice(0, 60), "damaged"), (slice(0, 2), "damaged"), (slice(4, 60), "not a")]
)
def test_damaged_gzip(tmp_path: Path, cut: slice, fault: str) -> None:
    noise: npt.NDArray[np.uint8] = np.random.default_rng(0).integers(256, size=99, dtype=np.uint8)
    path = tmp_path / "labels.gz"
    path.write_bytes(gzip.compress(idx(noise))[cut])
    with pytest.raises(UsageError, match=f"{path} is .*{fault}"):
        read_idx(path, 1)
    with pytest.raises(UsageError, match=f"cannot read {tmp_path}: Is a directory"):
        read_idx(tmp_path, 1)
