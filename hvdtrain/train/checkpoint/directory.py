"""The checkpoints in the directory of a run: finding, marking and removing them."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hvdtrain.errors import UsageError
from hvdtrain.files import replacing
from hvdtrain.train.checkpoint.file import (
    BEST,
    CHECKPOINT,
    NO_POSITION,
    CheckpointName,
    load_checkpoint,
)
from hvdtrain.train.checkpoint.tensor_file import TensorLibrary


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint and its content."""

    path: Path | None = None
    content: dict[str, Any] = field(default_factory=dict)
    bad: list[str] = field(default_factory=list)


def checkpoint_files(directory: Path) -> list[Path]:
    """Return the checkpoints of a run except the best, newest first."""
    return [path for path, name in _files(directory) if name.kind == CHECKPOINT]


def best_file(directory: Path) -> Path | None:
    """Return the best checkpoint of a run, or None."""
    return next((path for path, name in _files(directory) if name.kind == BEST), None)


def newest_good(
    directory: Path, library: TensorLibrary, later_than: tuple[int, int] = NO_POSITION
) -> LoadedCheckpoint:
    """Read the newest checkpoint that is not damaged, which may be the best one (rank 0 only)."""
    found = LoadedCheckpoint()
    for path, name in _files(directory):
        if name.position <= later_than:
            break
        try:
            return replace(found, path=path, content=load_checkpoint(path, library))
        except UsageError as error:
            found.bad.append(str(error))
    return found


def mark_best(path: Path) -> Path:
    """Give a checkpoint the name of the best one as well, and remove the best one before it."""
    name = CheckpointName.of(path)
    assert name is not None
    best = path.with_name(str(replace(name, kind=BEST)))
    try:
        os.link(path, best)
    except FileExistsError:
        pass
    except OSError:  # not every file system has hard links
        with replacing(best) as copy, open(path, "rb") as source:
            shutil.copyfileobj(source, copy)
    for other, named in _files(path.parent):
        if named.kind == BEST and other != best:
            other.unlink()
    return best


def remove_old(written: Path, keep: int) -> None:
    """Remove all but the last checkpoints, once a new one is on the disk.

    Checkpoints later than the new one are removed as well: they were damaged, and the run was
    resumed from one before them.
    """
    name = CheckpointName.of(written)
    assert name is not None
    files = _files(written.parent)
    before = [
        path for path, other in files if other.kind == CHECKPOINT and other.position < name.position
    ]
    kept = {written, *before[: keep - 1]}
    for path, other in files:
        if path not in kept and (other.kind == CHECKPOINT or other.position > name.position):
            path.unlink()


def _files(directory: Path) -> list[tuple[Path, CheckpointName]]:
    """Return all checkpoints, newest first; the best one follows one at the same position."""
    try:
        named = [(path, CheckpointName.of(path)) for path in directory.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [(path, name) for path, name in named if name is not None]
    return sorted(
        found, key=lambda item: (item[1].position, item[1].kind, str(item[0])), reverse=True
    )
