"""Files of data sets, as their owners write them."""

import gzip
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
CIFAR10_BATCHES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]


def idx(array: Bytes) -> bytes:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return header + array.tobytes()


def write_mnist(
    folder: Path, train: int, test: int, mark: str = "-", packed: bool = False
) -> tuple[Bytes, Bytes]:
    generator = np.random.default_rng(1)
    images = generator.integers(256, size=(train + test, 28, 28), dtype=np.uint8)
    labels = generator.integers(10, size=train + test, dtype=np.uint8)
    for stem, part in (("train", slice(train)), ("t10k", slice(train, None))):
        for kind, array in (("images", images[part]), ("labels", labels[part])):
            name = f"{stem}-{kind}{mark}idx{array.ndim}-ubyte"
            content = idx(array)
            path = folder / (f"{name}.gz" if packed else name)
            path.write_bytes(gzip.compress(content) if packed else content)
    return images, labels


def write_cifar10(folder: Path, rows: int, python: bool) -> tuple[Bytes, Bytes]:
    generator = np.random.default_rng(2)
    images = generator.integers(256, size=(6 * rows, 3072), dtype=np.uint8)
    labels = generator.integers(10, size=6 * rows, dtype=np.uint8)
    for number, stem in enumerate(CIFAR10_BATCHES):
        part = slice(number * rows, (number + 1) * rows)
        if python:
            (folder / stem).write_bytes(python_batch(images[part], labels[part]))
        else:
            records = np.concatenate([labels[part, None], images[part]], axis=1)
            (folder / f"{stem}.bin").write_bytes(records.tobytes())
    return images, labels


def python_batch(images: Bytes, labels: Bytes) -> bytes:
    """Return a batch as Python 2 pickled it, which Python 3 does not write any more."""

    def text(value: str) -> bytes:
        return b"U" + bytes([len(value)]) + value.encode()

    data = images.tobytes()
    array = [
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text("b") + b"\x87R",
        b"(K\x01" + b"J" + struct.pack("<i", len(images)) + b"M\x00\x0c\x86",
        b"cnumpy\ndtype\n" + text("u1") + b"K\x00K\x01\x87R",
        b"(K\x03" + text("|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb",
        b"\x89T" + struct.pack("<i", len(data)) + data + b"tb",
    ]
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    items = [
        text("batch_label") + text("training batch 1 of 5"),
        text("labels") + numbers,
        text("data") + b"".join(array),
    ]
    return b"\x80\x02}(" + b"".join(items) + b"u."


def write_images(paths: list[Path], pixels: tuple[int, int] = (40, 30)) -> None:
    """Write an image, width x height, of one colour each: red is its number."""
    from PIL import Image

    for number, path in enumerate(paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", pixels, (number, 100, 200)).save(path)
