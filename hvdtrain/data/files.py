"""Read files that a user provides; every fault is reported in one line."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.errors import UsageError


def data_folder(data_dir: Path | None, data_set: str, layout: str) -> Path:
    """Return the folder of a data set after checking that it exists."""
    if data_dir is None:
        raise UsageError(f"{data_set} needs --data-dir DIR, with {layout}; nothing is downloaded")
    if not data_dir.is_dir():
        raise UsageError(
            f"{data_set}: there is no folder {data_dir}; expected a folder with {layout}; nothing "
            "is downloaded"
        )
    return data_dir


def missing_files(data_set: str, folder: Path, names: Sequence[str], layout: str) -> UsageError:
    """Return the error for missing files of a data set."""
    return UsageError(
        f"{data_set}: {', '.join(names)} not found in {folder}; expected {layout}; nothing is "
        "downloaded"
    )


def read_bytes(path: Path) -> bytes:
    """Return the content of a file, decompressed if its name ends in .gz."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as stream:
                return stream.read()
        return path.read_bytes()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UsageError(f"{path} is damaged or not a gzip file: {error}") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None


def read_text(path: Path) -> str:
    """Return the content of a text file in UTF-8."""
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not text in UTF-8: byte {error.start} is invalid") from None
