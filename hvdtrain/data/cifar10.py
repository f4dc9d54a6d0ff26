"""CIFAR-10: 60,000 color images of 32 x 32 pixels, as binary or as Python batches."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdtrain.data.dataset import Dataset, Samples
from hvdtrain.data.files import data_folder, missing_files, read_bytes
from hvdtrain.data.images import standardized_colors
from hvdtrain.errors import UsageError

__all__ = ["CLASSES", "load_cifar10"]

_IMAGE_BYTES = 3 * 32 * 32


def read_python_batch(path: Path) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Return the images, uint8 [n, 3072], and the labels, uint8 [n], of a pickled batch."""
    content = read_bytes(path)
    try:
        batch = _Unpickler(io.BytesIO(content), encoding="bytes").load()
        data, labels = batch[b"data"], batch[b"labels"]
        images = np.frombuffer(data.content, np.uint8).reshape(len(labels), _IMAGE_BYTES)
        return images, np.array(labels, np.uint8).reshape(len(images))
    # A damaged pickle may raise anything.
    except Exception as error:
        raise UsageError(
            f"{path} is damaged or not a Python batch of cifar10 "
            f"({type(error).__name__}: {error}): download it again, or "
            "use the binary version"
        ) from None


class _Array:
    """Stands for a numpy array and keeps its bytes."""

    content: bytes = b""

    def __init__(self, *_: object) -> None:
        """Accept the arguments of numpy's _reconstruct, which hold no data yet."""

    def __setstate__(self, state: tuple[object, object, _Dtype, bool, object]) -> None:
        """Accept numpy's (version, shape, dtype, whether it is in Fortran order, bytes)."""
        _, _, dtype, in_fortrans_order, content = state
        if dtype.name not in (b"u1", "u1") or in_fortrans_order or type(content) is not bytes:
            raise pickle.UnpicklingError("its data are not rows of unsigned bytes")
        self.content = content


class _Dtype:
    """Stands for a numpy dtype and keeps its name."""

    def __init__(self, name: bytes | str, *_: object) -> None:
        self.name = name

    def __setstate__(self, state: object) -> None:
        """Accept the byte order and more, which do not matter for unsigned bytes."""


_KNOWN = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
}


class _Unpickler(pickle.Unpickler):
    """Knows the names that a batch needs, and refuses all others."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the class that stands for a name."""
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no such batch needs")
        return _KNOWN[module, name]


CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)

_LAYOUT = (
    "data_batch_1.bin to data_batch_5.bin and test_batch.bin (the binary version), or data_batch_1 "
    "to data_batch_5 and test_batch (the Python version), there or in cifar-10-batches-bin or "
    "cifar-10-batches-py"
)
_Batch = tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]


def load_cifar10(data_dir: Path | None) -> Dataset:
    """Load the images, standardized float32 [n, 3, 32, 32], and labels from 0 to 9.

    If both versions of the files are there, the binary one is used.

    Raises:
        UsageError: a file is missing or damaged.
    """
    folder = data_folder(data_dir, "cifar10", _LAYOUT)
    stems = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    paths, read = _version(folder, stems)
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise missing_files("cifar10", paths[0].parent, missing, _LAYOUT)
    batches = [_checked(path, *read(path)) for path in paths]
    return Dataset(_samples(batches[:-1]), _samples(batches[-1:]))


def read_binary_batch(path: Path) -> _Batch:
    """Return the images, uint8 [n, 3072], and the labels, uint8 [n], of a binary batch."""
    content = read_bytes(path)
    record = 1 + _IMAGE_BYTES
    if len(content) % record:
        raise UsageError(
            f"{path} is truncated or not a binary batch of cifar10: its {len(content)} bytes are "
            f"not a multiple of {record}"
        )
    rows = np.frombuffer(content, np.uint8).reshape(-1, record)
    return rows[:, 1:], rows[:, 0]


def _version(folder: Path, stems: list[str]) -> tuple[list[Path], Callable[[Path], _Batch]]:
    """Return the files of the version that is there, and the function that reads one of them."""
    for inner, ending, read in (
        ("cifar-10-batches-bin", ".bin", read_binary_batch),
        ("cifar-10-batches-py", "", read_python_batch),
    ):
        for parent in (folder, folder / inner):
            paths = [parent / f"{stem}{ending}" for stem in stems]
            if any(path.is_file() for path in paths):
                return paths, read
    raise missing_files("cifar10", folder, [f"{stems[0]}.bin", stems[0]], _LAYOUT)


def _checked(path: Path, images: npt.NDArray[np.uint8], labels: npt.NDArray[np.uint8]) -> _Batch:
    if not len(labels):
        raise UsageError(f"{path} has no images")
    if labels.max() >= len(CLASSES):
        row = int(np.argmax(labels >= len(CLASSES)))
        raise UsageError(f"{path}: label {labels[row]} of image {row} is not from 0 to 9")
    return images, labels


def _samples(batches: list[_Batch]) -> Samples:
    images = np.concatenate([images for images, _ in batches]).reshape(-1, 3, 32, 32)
    return Samples(
        standardized_colors(images),
        np.concatenate([labels for _, labels in batches]).astype(np.int64),
    )
