"""Merging of the pieces that the ranks of a failed job have left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from hvdtrain.core.timeline.events import Event
from hvdtrain.core.timeline.file import TimelineError, write_events
from hvdtrain.core.timeline.growing_file import earlier_path, read_events
from hvdtrain.core.timeline.pieces import find_pieces, piece_path


def merge_pieces(path: str, out: str) -> list[Path]:
    """Merge the pieces of a timeline into one file; return the paths of the pieces."""
    pieces = _found(path)
    if not pieces:
        raise TimelineError(
            f"no pieces such as {piece_path(path, 0)} are there: look on the hosts of the ranks; a "
            "job that ends well removes them"
        )
    write_events(out, _events(pieces), {"pieces": [piece.name for piece in pieces]})
    return pieces


def _found(path: str) -> list[Path]:
    try:
        return find_pieces(path)
    except OSError as error:
        raise TimelineError(
            f"{path} cannot be searched for ({error.strerror}): name the timeline of a job"
        ) from error


def _events(pieces: Sequence[Path]) -> Iterator[Event]:
    earlier = {Path(earlier_path(str(piece))) for piece in pieces}
    for piece in pieces:
        try:
            with open(piece, encoding="utf-8", errors="replace") as lines:
                yield from read_events(lines, all_of_them=piece not in earlier)
        except OSError as error:
            raise TimelineError(f"{piece} cannot be read ({error.strerror})") from error
