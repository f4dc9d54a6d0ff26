"""Checkpoints of arrays: plain `numpy.load(path)` opens them.

The array "model/NAME" is a weight, "optimizer/NAME" a variable of the optimizer, and "about" a
text in JSON with all that is no array.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

__all__ = ["read", "write"]

_ABOUT = "about"
_PARTS = ("model", "optimizer")


def write(file: BinaryIO, content: Mapping[str, Any]) -> None:
    """Write "model" and "optimizer", arrays by name, and what else JSON can hold."""
    about = {key: value for key, value in content.items() if key not in _PARTS}
    arrays = {
        f"{part}/{name}": np.asarray(array)
        for part in _PARTS
        for name, array in content[part].items()
    }
    np.savez(file, allow_pickle=False, **{_ABOUT: np.array(json.dumps(about))}, **arrays)


def read(path: Path) -> Any:
    """Return what is in a file."""
    with np.load(path, allow_pickle=False) as file:
        content = json.loads(str(file[_ABOUT]))
        for part in _PARTS:
            start = f"{part}/"
            content[part] = {
                name.removeprefix(start): file[name] for name in file if name.startswith(start)
            }
    return content
