"""The directory of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.files import remove_leftovers, unfinished_file


def prepare_directory(directory: Path) -> None:
    """Create the directory, check that it is writable, and remove leftovers of killed runs."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with unfinished_file(directory) as file:
            file.write(b"\0")
        remove_leftovers(directory)
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
