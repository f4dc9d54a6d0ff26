"""Checkpoints of PyTorch: plain `torch.load(path, weights_only=True)` opens them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

__all__ = ["read", "write"]


def write(file: BinaryIO, content: Mapping[str, Any]) -> None:
    """Write tensors, numbers, strings, and lists and dicts of them."""
    torch.save(content, file)


def read(path: Path) -> Any:
    """Return what is in a file, its tensors in CPU memory."""
    return torch.load(path, map_location="cpu", weights_only=True)
