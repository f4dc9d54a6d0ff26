"""The Python version of CIFAR-10, read without running anything that its files may name.

Its batches are pickles, which can call any function by name. Only the names that these files need
are known here, and each stands for a plain class of this module: not even numpy's own functions
receive the content of a file.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdtrain.data.files import read_bytes
from hvdtrain.errors import UsageError

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
