"""Files of a timeline: the pieces that ranks write while the job runs, and the file of all ranks.

The pieces survive if the job is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from hvdtrain.core.exits import write_message
from hvdtrain.core.timeline.records import Event, RankEvents, RankRecords
from hvdtrain.errors import UsageError
from hvdtrain.files import replacing, unfinished_file

_MOST_BYTES = 32 << 20
_BEGINNING = '{"displayTimeUnit": "ms", "otherData": {'
_SEPARATOR = ",\n"
_END = "\n]}\n"
_PASSING = "\n"  # an empty line, which precedes the events that the next write replaces


class GrowingFile:
    """A file of trace events, the last of which are replaced at each write.

    The file never becomes shorter, so that a single write completes it again: shorter contents are
    padded with blanks. When the file is too large for a browser, it is renamed, replacing an
    earlier one, and a new file begins. `also` is another name of it.
    """

    def __init__(
        self,
        path: str,
        notes: dict[str, object],
        also: str | None = None,
        most_bytes: int = _MOST_BYTES,
    ) -> None:
        self.path, self._also = path, also
        self._most_bytes = most_bytes
        self._head = f'{_BEGINNING}{json.dumps(notes)[1:]}, "traceEvents": [\n'
        self._begin()

    def _begin(self) -> None:
        self._file = open(self.path, "wb")  # noqa: SIM115  # until close()
        self._place = self._size = self._file.write(self._head.encode())
        if self._also is not None:
            link = Path(f"{self.path}.link")
            with contextlib.suppress(OSError):  # some file systems have no hard links
                link.unlink(missing_ok=True)  # of a job that was killed
                os.link(self.path, link)
                os.replace(link, self._also)

    def write(
        self, lasting: Iterable[dict[str, object]], passing: Iterable[dict[str, object]]
    ) -> None:
        if self._place > self._most_bytes:
            self.close()
            os.replace(self.path, earlier_path(self.path))
            self._begin()
        stays = "".join(json.dumps(event) + _SEPARATOR for event in lasting).encode()
        goes = (_PASSING + _SEPARATOR.join(map(json.dumps, passing)) + _END).encode()
        self._file.seek(self._place)
        self._file.write((stays + goes).ljust(self._size - self._place))
        self._file.flush()
        self._place += len(stays)
        self._size = max(self._size, self._place + len(goes))

    def close(self) -> None:
        """Close the file without removing it."""
        self._file.close()


def read_events(lines: Iterable[str], all_of_them: bool) -> Iterator[dict[str, object]]:
    """Yield the events of a file, whose last write may have been interrupted."""
    passing = False
    for line in lines:
        passing |= not line.strip()
        try:
            event = json.loads(line.rstrip().removesuffix(","))
        except ValueError:  # the beginning, the end, or an interrupted write
            continue
        if "ph" in event and (all_of_them or not passing or event["ph"] == "M"):
            yield event


def earlier_path(path: str) -> str:
    """Return the name that a file gets when a new one with its name begins."""
    stem, suffix = os.path.splitext(path)
    return f"{stem}.earlier{suffix}"


def piece_path(path: str, rank: int) -> str:
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
    with contextlib.suppress(OSError), open(path, "rb") as file:
        if file.read(len(_BEGINNING)) == _BEGINNING.encode():
            os.unlink(path)


_PAUSE_SECONDS = 0.5
# An abort does not wait longer for a disk that does not respond.
_LOCK_TIMEOUT_SECONDS = 1.0


class PieceWriter:
    """A thread that writes the records of a rank, from its creation to close()."""

    def __init__(
        self,
        file: GrowingFile | None,
        times: RankRecords,
        under_way: Callable[[], RankRecords],
        title: str,
        rank: int,
        host: str,
    ) -> None:
        self._file, self._title = file, title
        self._path = file.path if file is not None else None
        self._times, self._under_way = times, under_way
        self._events = RankEvents(times, rank, host)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="hvdtrain-timeline", daemon=True)
        self.save()
        self._thread.start()

    def save(self) -> None:
        if self._lock.acquire(timeout=_LOCK_TIMEOUT_SECONDS):
            try:
                self._write()
            finally:
                self._lock.release()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self.save()
        self._release()

    def remove(self) -> None:
        """Remove the file after close(), because its contents are in another file."""
        if self._path is not None:
            remove_piece(self._path)

    def _serve(self) -> None:
        while not self._closing.wait(_PAUSE_SECONDS):
            self.save()

    def _write(self) -> None:
        fresh = self._times.take()
        if self._file is None:
            return
        try:
            lasting = list(self._events.add(fresh))
            passing = self._events.passing(self._under_way())
            self._file.write(lasting, passing)
        except Exception as error:  # no error of the timeline ends the job
            reason = error.strerror if isinstance(error, OSError) else None
            write_message(self._title, f"timeline: {self._path} ends here: {reason or repr(error)}")
            self._release()

    def _release(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # a failed write has been reported already
                file.close()


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
    try:
        pieces = find_pieces(path)
    except OSError as error:
        raise TimelineError(
            f"{path} cannot be searched for ({error.strerror}): name the timeline of a job"
        ) from error
    if not pieces:
        raise TimelineError(
            f"no pieces such as {piece_path(path, 0)} are there: look on the hosts of the ranks; a "
            "job that ends well removes them"
        )
    write_events(out, _events(pieces), {"pieces": [piece.name for piece in pieces]})
    return pieces


def _events(pieces: Sequence[Path]) -> Iterator[Event]:
    earlier = {Path(earlier_path(str(piece))) for piece in pieces}
    for piece in pieces:
        try:
            with open(piece, encoding="utf-8", errors="replace") as lines:
                yield from read_events(lines, all_of_them=piece not in earlier)
        except OSError as error:
            raise TimelineError(f"{piece} cannot be read ({error.strerror})") from error
