"""Checkpoint files: written whole or not at all, and proved whole before they are used.

A file is named checkpoint-EPOCH-DIGEST.SUFFIX, where DIGEST is the start of the SHA-256 of its
bytes, and SUFFIX says how it is written: see FORMATS. That of a run which was stopped within an
epoch is named checkpoint-EPOCH+SAMPLES-DIGEST.SUFFIX, and stays until the next one is written.
"""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from hvdtrain.errors import UsageError
from hvdtrain.train.files import publish, unfinished_file

__all__ = [
    "FORMATS",
    "checkpoint_epoch",
    "checkpoint_files",
    "checkpoint_position",
    "load_checkpoint",
    "save_checkpoint",
]

# The suffix of a file, and the module that reads and writes it.
FORMATS = {"pt": "hvdtrain.train.torch_file", "npz": "hvdtrain.train.numpy_file"}

_NAME = re.compile(rf"checkpoint-(\d+)(?:\+(\d+))?-([0-9a-f]{{16}})\.(?:{'|'.join(FORMATS)})")
_DIGEST_LENGTH = 16


class _Format(Protocol):
    def write(self, file: BinaryIO, content: Mapping[str, Any]) -> None: ...

    def read(self, path: Path) -> Any: ...


def save_checkpoint(
    directory: Path, epoch: int, samples: int, content: dict[str, Any], suffix: str
) -> Path:
    """Write a checkpoint, in place of any other of this place or within an epoch (rank 0 only).

    Args:
        directory: of the run.
        epoch: epochs done.
        samples: done of the next one.
        content: tensors or arrays, numbers, strings, and lists and dicts of them.
        suffix: one of FORMATS.
    """
    with unfinished_file(directory) as file:
        _format(suffix).write(file, content)
        file.flush()
        digest = _digest(Path(file.name))
        place = f"{epoch:04d}+{samples}" if samples else f"{epoch:04d}"
        path = directory / f"checkpoint-{place}-{digest}.{suffix}"
        publish(file, path)
    for other in checkpoint_files(directory):
        at = checkpoint_position(other)
        if other != path and (at == (epoch, samples) or at[1]):
            other.unlink()
    return path


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint into CPU memory (rank 0 only).

    Returns:
        What save_checkpoint() was given: "model" has tensors or arrays by name, and "epoch" a
        number.

    Raises:
        UsageError: it is missing, unreadable, damaged, or no checkpoint; the message names it.
    """
    named = _NAME.fullmatch(path.name)
    try:
        if not path.is_file():
            raise UsageError(f"there is no checkpoint {path}: name an existing file")
        if named is not None and _digest(path) != named[3]:
            raise ValueError("its content is not what was written")
        content = _format(path.suffix[1:]).read(path)
    except UsageError:
        raise
    except ModuleNotFoundError as error:
        raise UsageError(f"checkpoint {path} needs {error.name}, which is not installed") from error
    except OSError as error:
        raise UsageError(
            f"checkpoint {path} cannot be read ({error.strerror}): name another with --resume"
        ) from error
    except Exception as error:  # reading raises a dozen types for damaged files
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UsageError(f"checkpoint {path} is damaged: {reason}") from error
    if not _is_checkpoint(content):
        raise UsageError(f"{path} is not a checkpoint of hvdtrain")
    checkpoint: dict[str, Any] = content
    return checkpoint


def checkpoint_files(directory: Path) -> list[Path]:
    """Return the checkpoints of a run, newest first; none where there is no directory.

    Raises:
        OSError: the directory cannot be looked at.
    """
    try:
        found = [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(found, key=lambda path: (checkpoint_position(path), path.name), reverse=True)


def checkpoint_epoch(path: Path) -> int:
    """Return the number of whole epochs in a checkpoint's name; -1 where there is none."""
    return checkpoint_position(path)[0]


def checkpoint_position(path: Path) -> tuple[int, int]:
    """Return the epochs and the samples of the next one in a checkpoint's name; -1: no name."""
    named = _NAME.fullmatch(path.name)
    return (-1, 0) if named is None else (int(named[1]), int(named[2] or 0))


def _is_checkpoint(content: object) -> bool:
    return (
        isinstance(content, dict)
        and "epoch" in content
        and isinstance(content.get("model"), dict)
        and all(hasattr(tensor, "shape") for tensor in content["model"].values())
    )


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:_DIGEST_LENGTH]


def _format(suffix: str) -> _Format:
    """Return the module for files of this suffix; one that is renamed is torch's."""
    module: Any = importlib.import_module(FORMATS.get(suffix, FORMATS["pt"]))
    form: _Format = module
    return form
