"""The directory of a run, and files in it that are written completely or not at all."""

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

_UNFINISHED = ".unfinished-"
_DAY_SECONDS = 86400.0
# Errors of file systems that cannot sync directories.
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP)


def prepare_directory(directory: Path) -> None:
    """Create the directory, check that it is writable, and remove leftovers of killed runs."""
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
    """Create a new directory parent/name-DATE-TIME, with a number if needed."""
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
    """Turn an OSError in the block into a UsageError about the files of a run."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{error.filename or directory} cannot be used ({error.strerror}): name another "
            "directory with --out"
        ) from error


@contextmanager
def unfinished_file(directory: Path) -> Iterator[BinaryIO]:
    """Open a temporary file of this thread; publish() names it when it is complete.

    Whatever ends the block, including a signal, no temporary file stays.
    """
    mine = f"{os.getpid()}.{threading.get_native_id()}"
    path = directory / f"{_UNFINISHED}{socket.gethostname()}-{mine}"
    try:
        with open(path, "wb") as file:
            yield file
    finally:
        path.unlink(missing_ok=True)


def publish(file: BinaryIO, path: Path) -> None:
    """Flush an unfinished file to the disk, then rename it, replacing `path` atomically."""
    file.flush()
    os.fsync(file.fileno())
    os.replace(file.name, path)
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Flush the names in a directory to the disk, if the file system supports it."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(descriptor)


def _is_stale(unfinished: Path) -> bool:
    """Return whether nobody writes this file any more; another job may be using the directory."""
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
