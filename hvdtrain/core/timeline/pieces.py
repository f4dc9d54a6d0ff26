"""The files of the pieces that ranks write while the job runs, next to the final file."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from hvdtrain.core.timeline.growing_file import earlier_path, is_growing_file


def piece_path(path: str, rank: int) -> str:
    """Return the path of a rank's piece of a timeline."""
    stem, suffix = os.path.splitext(path)
    return f"{stem}.rank-{rank}{suffix}"


def find_pieces(path: str) -> list[Path]:
    """Return the pieces of the timeline at `path`, ordered by rank and time."""
    stem, suffix = map(re.escape, os.path.splitext(os.path.basename(path)))
    name = re.compile(rf"{stem}\.rank-(\d+)(\.earlier)?{suffix}")
    found = [
        (int(match[1]), match[2] is None, entry)
        for entry in Path(path).parent.iterdir()
        if (match := name.fullmatch(entry.name))
    ]
    return [entry for _, _, entry in sorted(found)]


def remove_piece(path: str) -> None:
    """Remove a piece and the earlier one of the same rank."""
    with contextlib.suppress(OSError):
        os.unlink(path)
    _remove_ours(earlier_path(path))


def remove_pieces(path: str) -> None:
    """Remove all pieces of the timeline at `path`, also those of an earlier job."""
    with contextlib.suppress(OSError):
        for piece in find_pieces(path):
            _remove_ours(piece)


def _remove_ours(path: str | Path) -> None:
    # Other programs may write files with such names, e.g. torch.profiler.
    with contextlib.suppress(OSError):
        if is_growing_file(path):
            os.unlink(path)
