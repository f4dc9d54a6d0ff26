"""Tracebacks of hvdtrain's own errors, which end in the line of the script that led to them."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

import hvdtrain
from hvdtrain.errors import HvdtrainError

__all__ = ["format_error"]

_PACKAGE = str(Path(hvdtrain.__file__).parent)
_LIBRARIES = tuple(
    sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib", "scripts")
)


def format_error(error: BaseException) -> str:
    """Return the traceback of an error, with its last line (local).

    That of an error of hvdtrain's ends in the last line of the script: how hvdtrain found the error
    tells nothing about its cause. If the error has a cause in hvdtrain, everything is shown.
    """
    told = traceback.TracebackException.from_exception(error)
    if isinstance(error, HvdtrainError) and error.__cause__ is None:
        own = [number for number, frame in enumerate(told.stack) if _is_script(frame.filename)]
        if own:
            del told.stack[own[-1] + 1 :]
    return "".join(told.format())


def _is_script(path: str) -> bool:
    if path.startswith("<frozen "):
        return False
    return not path.startswith(tuple(f"{folder}{os.sep}" for folder in (_PACKAGE, *_LIBRARIES)))
