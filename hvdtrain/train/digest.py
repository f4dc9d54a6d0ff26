"""A fingerprint of a model's weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["weights_digest"]


def weights_digest(weights: Mapping[str, npt.NDArray[Any]]) -> str:
    """Return the SHA-256 of all weights of this rank's model (local).

    Names, types, shapes and bytes count, in the order of `weights`.
    """
    digest = hashlib.sha256()
    for name, array in weights.items():
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
