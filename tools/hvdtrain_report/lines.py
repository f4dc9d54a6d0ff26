"""Readers of the JSON files of a run, with errors of one line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeAlias

from hvdtrain.errors import UsageError

# What is in it is checked where it is read: files may be damaged.
JsonObject: TypeAlias = dict[str, Any]

_CHUNK_BYTES = 1 << 18


class Lines:
    """Iterates over the objects of a file with one JSON object per line, in chunks for speed.

    An incomplete last line, as a killed run leaves it, is skipped. Iteration raises UsageError if
    the file cannot be read or another line is not a JSON object.
    """

    def __init__(self, path: Path) -> None:
        self.torn = False
        self._path = path
        self._before = 0

    def __iter__(self) -> Iterator[list[JsonObject]]:
        try:
            with open(self._path, "rb") as file:
                while lines := file.readlines(_CHUNK_BYTES):
                    yield _together(lines) or self._one_by_one(lines, file)
                    self._before += len(lines)
        except OSError as error:
            raise UsageError(f"{self._path}: {error.strerror}") from error

    def wrong(self, place: int, what: str) -> UsageError:
        """Return an error about an object of the last chunk."""
        line = self._before + place + 1
        return UsageError(f"{self._path}, line {line}: {what}: the file is damaged")

    def _one_by_one(self, lines: list[bytes], file: BufferedReader) -> list[JsonObject]:
        found: list[JsonObject] = []
        for place, line in enumerate(lines):
            parsed = _parsed(line)
            if parsed is not None:
                found.append(parsed)
            elif place + 1 == len(lines) and not file.peek(1):
                self.torn = True
            else:
                raise self.wrong(place, "not a JSON object")
        return found


def read_object(path: Path) -> JsonObject:
    """Return the JSON object in a file."""
    try:
        found = _parsed(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    if found is None:
        raise UsageError(f"{path}: not a JSON object: the file is damaged")
    return found


def number(value: object) -> float | None:
    """Return a JSON value as a number: NaN for null, None if it is not a number."""
    if value is None:
        return float("nan")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _together(lines: list[bytes]) -> list[JsonObject]:
    """Parse all lines at once; return an empty list if one of them is not an object."""
    try:
        found: list[JsonObject] = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        return []
    whole = len(found) == len(lines) and set(map(type, found)) == {dict}
    return found if whole else []


def _parsed(text: bytes) -> JsonObject | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
