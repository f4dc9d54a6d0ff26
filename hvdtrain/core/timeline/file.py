"""Writing of timeline files."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from hvdtrain.core.timeline.events import Event, RankEvents
from hvdtrain.core.timeline.piece import earlier_path, find_pieces, piece_path, read_events
from hvdtrain.core.timeline.times import RankRecords
from hvdtrain.errors import UsageError
from hvdtrain.files import replacing, unfinished_file


class TimelineError(UsageError, ValueError):
    """A timeline cannot be recorded, or its file cannot be written."""


def usable_path(file_path: str) -> str:
    """Return the full path of a file, after checking that it can be written."""
    path = os.path.realpath(file_path)
    if os.path.exists(path) and not os.path.isfile(path):
        raise TimelineError(f"timeline {path} cannot be written: it is not a file; name another")
    try:
        with unfinished_file(Path(path).parent):
            pass
    except OSError as error:
        raise _cannot_write(path, error) from error
    return path


def write(path: str, collected: Sequence[bytes], hostnames: Sequence[str]) -> None:
    """Write the records of all ranks to a file (on rank 0)."""
    clocks: list[dict[str, float]] = []
    dropped: dict[str, int] = {}

    def events() -> Iterator[Event]:
        """Yield the events of all ranks, with one rank at a time in memory."""
        for rank, (data, host) in enumerate(zip(collected, hostnames, strict=True)):
            times: RankRecords = pickle.loads(data)
            trace = RankEvents(times, rank, host)
            yield from trace.add(times)
            yield from trace.metadata()
            clocks.append(_clock(times))
            dropped[f"rank {rank}"] = times.dropped

    notes = {"clocks, in seconds against rank 0": clocks, "dropped records": dropped}
    write_events(path, events(), notes)


def write_events(path: str, events: Iterable[Event], notes: Mapping[str, object]) -> None:
    """Write a trace file atomically."""
    try:
        with replacing(Path(path)) as file:
            separator = '{"displayTimeUnit": "ms", "traceEvents": [\n'
            for event in events:
                file.write((separator + json.dumps(event)).encode())
                separator = ",\n"
            file.write(f'\n], "otherData": {json.dumps(notes)}}}\n'.encode())
    except OSError as error:
        raise _cannot_write(path, error) from error


def _clock(times: RankRecords) -> dict[str, float]:
    return {
        "offset at start": times.start.offset_seconds,
        "error at start": times.start.error_seconds,
        "offset at end": times.stop.offset_seconds,
        "error at end": times.stop.error_seconds,
    }


def _cannot_write(path: str, error: OSError) -> TimelineError:
    return TimelineError(
        f"timeline {path} cannot be written ({error.strerror}): name a file in a directory that "
        "is there on rank 0's host and may be written to"
    )


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
