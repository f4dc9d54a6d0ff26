"""Files that are written completely or not at all."""

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

_UNFINISHED = ".unfinished-"
_DAY_SECONDS = 86400.0
# Errors of file systems that cannot sync directories.
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` atomically at the end of the block, if that has no error."""
    with unfinished_file(path.parent) as file:
        yield file
        publish(file, path)


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


def remove_leftovers(directory: Path) -> None:
    """Remove what killed processes have not finished."""
    for path in directory.glob(f"{_UNFINISHED}*"):
        if _is_stale(path):
            path.unlink(missing_ok=True)


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
