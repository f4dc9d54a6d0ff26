"""Tracebacks of hvdtrain's own errors, which end where hvdtrain was called."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

import hvdtrain
from hvdtrain.errors import HvdtrainError

_PACKAGE = Path(hvdtrain.__file__).parent
_STANDARD = Path(sysconfig.get_path("stdlib"))
_SCRIPTS = Path(sysconfig.get_path("scripts"))
_INSTALLED = {"site-packages", "dist-packages"}
# Through which hvdtrain is called, as by backward().
_FRAMEWORKS = ("torch", "tensorflow", "keras", "jax")


def format_error(error: BaseException) -> str:
    """Return the traceback of an error, with its last line.

    That of an error of hvdtrain's ends in the line that called hvdtrain, or a framework that did:
    how hvdtrain found the error tells nothing about its cause. If the error has a cause in
    hvdtrain, or no script has led to it, everything is shown.
    """
    told = traceback.TracebackException.from_exception(error)
    paths = [frame.filename for frame in told.stack]
    if (
        isinstance(error, HvdtrainError)
        and error.__cause__ is None
        and any(_is_script(path) for path in paths)
    ):
        inner = (_PACKAGE, *_frameworks())
        while not _is_script(paths[-1]) and _is_internal(paths[-1], inner):
            del paths[-1], told.stack[-1]
    return "".join(told.format())


def _frameworks() -> Iterator[Path]:
    """Yield the folders of the frameworks that are loaded."""
    for name in _FRAMEWORKS:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None:
            yield Path(file).parent


def _is_script(path: str) -> bool:
    """Return whether a file is the user's own: not hvdtrain's, installed, or Python's."""
    if path.startswith("<frozen "):
        return False
    file = Path(path)
    folders = (_PACKAGE, _STANDARD, _SCRIPTS)
    return not (
        any(file.is_relative_to(folder) for folder in folders) or _INSTALLED & set(file.parts)
    )


def _is_internal(path: str, inner: tuple[Path, ...]) -> bool:
    """Return whether a file belongs to hvdtrain, a framework or Python's library."""
    file = Path(path)
    if any(file.is_relative_to(folder) for folder in inner) or path.startswith("<frozen "):
        return True
    return file.is_relative_to(_STANDARD) and not _INSTALLED & set(file.parts)
