"""The directory of a run, and files in it that are never half there."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from hvdtrain.errors import UsageError

__all__ = [
    "new_directory",
    "prepare_directory",
    "publish",
    "sync_directory",
    "unfinished_file",
    "usage_errors",
]

_UNFINISHED = ".unfinished-"
_DAY_SECONDS = 86400.0
# What a file system says that does not bring directories to the disk on request.
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP)


def prepare_directory(directory: Path) -> None:
    """Make the directory, see that it can be written, and remove what killed runs left.

    Raises:
        UsageError: it is a file, or cannot be made or written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with unfinished_file(directory) as file:
            file.write(b"\0")
        for path in directory.glob(f"{_UNFINISHED}*"):
            if _is_stale(path):
                path.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(
            f"{directory} cannot be written ({error.strerror}): name another directory with --out"
        ) from error


def new_directory(parent: Path, name: str) -> Path:
    """Make a directory that was not there before: parent/name-DATE-TIME, numbered if need be.

    Raises:
        UsageError: it cannot be made or written.
    """
    prepare_directory(parent)
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 1
    while True:
        directory = parent / (stem if number == 1 else f"{stem}-{number}")
        try:
            directory.mkdir()
            return directory
        except FileExistsError:
            number += 1


@contextmanager
def usage_errors(directory: Path) -> Iterator[None]:
    """Take it for bad input where files of a run cannot be read or written in the block.

    Raises:
        UsageError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{error.filename or directory} cannot be used ({error.strerror}): name another "
            "directory with --out"
        ) from error


@contextmanager
def unfinished_file(directory: Path) -> Iterator[BinaryIO]:
    """Open a temporary file of this thread, to be given its name by publish() when it is complete.

    Whatever ends the block, a signal included, no temporary file stays.
    """
    mine = f"{os.getpid()}.{threading.get_native_id()}"
    path = directory / f"{_UNFINISHED}{socket.gethostname()}-{mine}"
    try:
        with open(path, "wb") as file:
            yield file
    finally:
        path.unlink(missing_ok=True)


def publish(file: BinaryIO, path: Path) -> None:
    """Bring an unfinished file to the disk, then rename it; it replaces `path` in one step."""
    file.flush()
    os.fsync(file.fileno())
    os.replace(file.name, path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Bring the names in a directory to the disk, where the file system can do that (local).

    Raises:
        OSError: it can, but fails.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(descriptor)


def _is_stale(unfinished: Path) -> bool:
    """Return whether nobody writes this file any more: another job may be at work here."""
    host, _, writer = unfinished.name.removeprefix(_UNFINISHED).rpartition("-")
    process_id = writer.partition(".")[0]
    if host == socket.gethostname() and process_id.isdecimal():
        return not _is_alive(int(process_id))
    try:
        return time.time() - unfinished.stat().st_mtime > _DAY_SECONDS
    except FileNotFoundError:
        return False


def _is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's
        return True
    return True
