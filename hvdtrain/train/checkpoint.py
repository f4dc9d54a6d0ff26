"""Checkpoint files: written whole or not at all, and proved whole before they are used.

A file is named checkpoint-EPOCH-DIGEST.pt, where DIGEST is the start of the SHA-256 of its
bytes; plain `torch.load(path, weights_only=True)` opens it.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import torch

from hvdtrain.errors import UsageError
from hvdtrain.train.files import publish, unfinished_file

__all__ = ["checkpoint_epoch", "checkpoint_files", "load_checkpoint", "save_checkpoint"]

_NAME = re.compile(r"checkpoint-(\d+)-([0-9a-f]{16})\.pt")
_DIGEST_LENGTH = 16


def save_checkpoint(directory: Path, epoch: int, content: dict[str, Any]) -> Path:
    """Write the checkpoint of an epoch, in place of any other of this epoch (rank 0 only).

    Args:
        directory: of the run.
        epoch: epochs done.
        content: tensors, numbers, strings, and lists and dicts of them.
    """
    with unfinished_file(directory) as file:
        torch.save(content, file)
        file.flush()
        digest = _digest(Path(file.name))
        path = directory / f"checkpoint-{epoch:04d}-{digest}.pt"
        publish(file, path)
    for other in checkpoint_files(directory):
        if checkpoint_epoch(other) == epoch and other != path:
            other.unlink()
    return path


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint into CPU memory (rank 0 only).

    Raises:
        UsageError: it is missing, damaged, or no checkpoint; the message names it.
    """
    if not path.is_file():
        raise UsageError(f"there is no checkpoint {path}: name an existing file")
    named = _NAME.fullmatch(path.name)
    try:
        if named is not None and _digest(path) != named[2]:
            raise ValueError("its content is not what was written")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises a dozen types for damaged files
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UsageError(f"checkpoint {path} is damaged: {reason}") from error
    if not isinstance(content, dict) or "model" not in content or "epoch" not in content:
        raise UsageError(f"{path} is not a checkpoint of hvdtrain")
    return content


def checkpoint_files(directory: Path) -> list[Path]:
    """Return the checkpoints of a run, newest epoch first."""
    found = [path for path in directory.glob("checkpoint-*.pt") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: (checkpoint_epoch(path), path.name), reverse=True)


def checkpoint_epoch(path: Path) -> int:
    """Return the epoch in a checkpoint's name; -1 where there is none."""
    named = _NAME.fullmatch(path.name)
    return -1 if named is None else int(named[1])


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:_DIGEST_LENGTH]
