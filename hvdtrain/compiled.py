"""Libraries that are compiled from C when hvdtrain is installed, if there is a compiler."""

from __future__ import annotations

import ctypes
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

__all__ = ["KernelError", "find_library", "open_library"]


class KernelError(Exception):
    """There is no usable kernel; the message says why and what to do."""


def find_library(module: str, folder: Path) -> Path | None:
    """Return the library in a folder or in an installed package; a checkout has none.

    Args:
        module: name of the library as a module, with its packages.
        folder: folder of the source.
    """
    *beneath, name = module.split(".")
    installed = (Path(entry, *beneath) for entry in sys.path)
    for place in (folder, *installed):
        for suffix in EXTENSION_SUFFIXES:
            path = place / f"{name}{suffix}"
            if path.is_file():
                return path
    return None


def open_library(path: Path | None, *sources: Path) -> ctypes.CDLL:
    """Load a library from a file.

    Args:
        path: result of find_library().
        sources: C files, the main one first, whose texts the library contains in this order between
            hvd_source and hvd_source_end.

    Raises:
        KernelError: the library is missing, does not load, or was compiled from different source,
            so that its structures or results may differ; or a source is not installed.
    """
    if path is None:
        raise KernelError(
            "it was not compiled when hvdtrain was installed: install a C compiler, "
            "then hvdtrain again"
        )
    try:
        library = ctypes.CDLL(str(path))
        compiled = _compiled_source(library)
    except (OSError, ValueError) as error:
        raise KernelError(f"{path} does not load ({error}): install hvdtrain again") from error
    try:
        text = b"".join(source.read_bytes() for source in sources)
    except OSError as error:
        raise KernelError(
            f"{error.filename} cannot be read ({error}): install hvdtrain again"
        ) from error
    if compiled != text:
        raise KernelError(f"{path} was not compiled from {sources[0]}: install hvdtrain again")
    return library


def _compiled_source(library: ctypes.CDLL) -> bytes:
    """Return the source text that is embedded in a library.

    Raises:
        ValueError: the library does not contain it.
    """
    begin, end = (
        ctypes.addressof(ctypes.c_char.in_dll(library, name))
        for name in ("hvd_source", "hvd_source_end")
    )
    return ctypes.string_at(begin, end - begin)
