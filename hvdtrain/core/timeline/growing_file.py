"""A trace file that is complete after every write, even if the process is killed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator

_MOST_BYTES = 32 << 20
_BEGINNING = '{"displayTimeUnit": "ms", "otherData": {'
_SEPARATOR = ",\n"
_END = "\n]}\n"
_PASSING = "\n"  # an empty line, which precedes the events that the next write replaces


class GrowingFile:
    """A file of trace events, the last of which are replaced at each write.

    The file never becomes shorter, so that a single write completes it again: shorter contents are
    padded with blanks. When the file is too large for a browser, it is renamed, replacing an
    earlier one, and a new file begins.
    """

    def __init__(self, path: str, notes: dict[str, object], most_bytes: int = _MOST_BYTES) -> None:
        self.path = path
        self._most_bytes = most_bytes
        self._head = f'{_BEGINNING}{json.dumps(notes)[1:]}, "traceEvents": [\n'
        self._begin()

    def _begin(self) -> None:
        self._file = open(self.path, "wb")  # noqa: SIM115  # until close()
        self._place = self._size = self._file.write(self._head.encode())

    def write(
        self, lasting: Iterable[dict[str, object]], passing: Iterable[dict[str, object]]
    ) -> None:
        """Append events."""
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


def read_events(lines: Iterable[str], all_of_them: bool = True) -> Iterator[dict[str, object]]:
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


def is_growing_file(path: str | os.PathLike[str]) -> bool:
    """Return whether a file begins like a GrowingFile."""
    with open(path, "rb") as file:
        return file.read(len(_BEGINNING)) == _BEGINNING.encode()


def earlier_path(path: str) -> str:
    """Return the name that a file gets when a new one with its name begins."""
    stem, suffix = os.path.splitext(path)
    return f"{stem}.earlier{suffix}"
