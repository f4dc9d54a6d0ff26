"""Libraries that are compiled when hvdtrain is installed: how they are found and checked."""

from __future__ import annotations

import ctypes
import logging
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from hvdtrain.errors import UsageError

# Of C++, in the order in which they are looked for.
COMPILERS = ("c++", "g++", "clang++")


def find_compiler(environ: Mapping[str, str], names: Sequence[str] = COMPILERS) -> tuple[str, ...]:
    """Return the command of the C++ compiler: that of CXX, else the first name on PATH."""
    import shlex  # a training run compiles nothing

    named = shlex.split(environ.get("CXX", ""))
    for words in [named] if named else [[name] for name in names]:
        if path := shutil.which(words[0], path=environ.get("PATH", "")):
            return (path, *words[1:])
    raise UsageError(
        f"no C++ compiler ({' '.join(named) or ', '.join(names)}): apt install g++, or load your "
        "site's compiler module"
    )


_logger = logging.getLogger("hvdtrain")

_HEADER = Path(__file__).with_name("kernel.h")


class KernelError(Exception):
    """There is no usable kernel; the message says why and what to do."""


def find_library(module: str, folder: Path) -> Path | None:
    """Return the library in a folder or in an installed package; a checkout has none."""
    *beneath, name = module.split(".")
    installed = (Path(entry, *beneath) for entry in sys.path)
    for place in (folder, *installed):
        # An older build may have left one for this version of Python alone, which comes first.
        for suffix in (*EXTENSION_SUFFIXES[1:], EXTENSION_SUFFIXES[0]):
            path = place / f"{name}{suffix}"
            if path.is_file():
                return path
    return None


def load_or_report(
    module: str, folder: Path, load: Callable[[Path | None], ctypes.CDLL], without: str
) -> ctypes.CDLL | None:
    """Return a library, or None if there is no usable one, after logging the reason."""
    path = find_library(module, folder)
    try:
        return load(path)
    except KernelError as error:
        report_missing(path, without, error)
        return None


def report_missing(path: Path | None, without: str, reason: object) -> None:
    """Log why a library is not used: one may be missing on purpose, but not unusable."""
    level = logging.INFO if path is None else logging.WARNING
    _logger.log(level, "hvdtrain: %s, which is slower: no compiled kernel: %s", without, reason)


def open_library(path: Path | None, source: Path, *headers: Path) -> ctypes.CDLL:
    """Load a library from a file."""
    if path is None:
        raise KernelError(
            "it was not compiled when hvdtrain was installed: install a C compiler, "
            "then hvdtrain again"
        )
    try:
        library = ctypes.CDLL(str(path))
        begin, end = (
            ctypes.addressof(ctypes.c_char.in_dll(library, name))
            for name in ("hvd_source", "hvd_source_end")
        )
        compiled = ctypes.string_at(begin, end - begin)
    except (OSError, ValueError) as error:
        raise KernelError(f"{path} does not load ({error}): install hvdtrain again") from error
    try:
        text = b"".join(file.read_bytes() for file in (_HEADER, source, *headers))
    except OSError as error:
        raise KernelError(
            f"{error.filename} cannot be read ({error}): install hvdtrain again"
        ) from error
    if compiled != text:
        raise KernelError(f"{path} was not compiled from {source}: install hvdtrain again")
    return library
