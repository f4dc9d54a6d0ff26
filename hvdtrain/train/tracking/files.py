"""Files that stay complete if the process is killed, except for their last record."""

from __future__ import annotations

import json
import os
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.files import replacing


class AppendFile:
    """A file that records are appended to, each in one write: a kill tears at most the last one.

    A record that does not fit on the disk leaves nothing behind: others may follow.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        self._bytes = os.fstat(self._file.fileno()).st_size

    def write(self, record: bytes) -> None:
        """Append a record."""
        try:
            written = self._file.write(record)
            while written < len(record):  # a partial write
                written += self._file.write(record[written:])
        except OSError:
            os.ftruncate(self._file.fileno(), self._bytes)
            raise
        self._bytes += len(record)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()


def save_json(path: Path, content: dict[str, str]) -> None:
    """Write a small JSON file, replacing an older one."""
    with replacing(path) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())


def load_json(path: Path, key: str) -> dict[str, str] | None:
    """Return what save_json() has written, or None if there is no file."""
    try:
        content: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
        content[key]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is damaged: remove it to begin a new run there") from error
    return content
