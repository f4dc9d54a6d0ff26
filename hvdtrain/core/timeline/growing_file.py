"""A file of events that is whole after every write, and that a kill leaves as it is."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["GrowingFile", "earlier_path", "is_growing_file", "read_events"]

_MOST_BYTES = 32 << 20
_BEGINNING = '{"displayTimeUnit": "ms", "otherData": {'
_SEPARATOR = ",\n"
_END = "\n]}\n"
_PASSING = "\n"  # an empty line, after which the events are that are replaced


class GrowingFile:
    """Events in the trace event format, of which the last ones are replaced at each write.

    The file never becomes shorter, so that one write makes it whole again: what was longer before
    is followed by blanks. When it is too large for a browser, it gets another name, in place of
    the one that had that name, and a new one begins.

    Args:
        path: of the file, which is replaced.
        notes: what is to stand at its beginning.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: str, notes: dict[str, Any], most_bytes: int = _MOST_BYTES) -> None:
        self.path = path
        self._most_bytes = most_bytes
        self._head = f'{_BEGINNING}{json.dumps(notes)[1:]}, "traceEvents": [\n'
        self._begin()

    def _begin(self) -> None:
        self._file = open(self.path, "wb")  # noqa: SIM115  # until close()
        self._place = self._size = self._file.write(self._head.encode())

    def write(self, lasting: Iterable[dict[str, Any]], passing: Iterable[dict[str, Any]]) -> None:
        """Put events behind those that are there (local).

        Args:
            lasting: stay in the file.
            passing: at least one; they follow, up to the next call.

        Raises:
            OSError: they cannot be written.
        """
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
        """Close the file, which stays (local)."""
        self._file.close()


def read_events(lines: Iterable[str], all_of_them: bool = True) -> Iterator[dict[str, Any]]:
    """Yield the events of a file, also of one whose last write was cut short (local).

    Args:
        lines: of the file.
        all_of_them: if not, of the events that another write would have replaced only names.
    """
    passing = False
    for line in lines:
        passing |= not line.strip()
        try:
            event = json.loads(line.rstrip().removesuffix(","))
        except ValueError:  # the beginning, the end, or where a write was cut
            continue
        if "ph" in event and (all_of_them or not passing or event["ph"] == "M"):
            yield event


def is_growing_file(path: str | os.PathLike[str]) -> bool:
    """Return whether a file begins like one of these (local).

    Raises:
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        return file.read(len(_BEGINNING)) == _BEGINNING.encode()


def earlier_path(path: str) -> str:
    """Return the name of what was written before the file of this name began."""
    stem, suffix = os.path.splitext(path)
    return f"{stem}.earlier{suffix}"
