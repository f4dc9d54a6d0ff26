"""A way around hvdtrain's answers to `import horovod`, for the engine that needs the real one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

__all__ = ["installed_horovod"]

_HVDTRAIN = Path(__file__).resolve().parents[1]


@contextmanager
def installed_horovod() -> Iterator[None]:
    """Have `import horovod` mean the installed package in this block, whoever answers outside."""
    path = sys.path[:]
    others = [entry for entry in path if not Path(entry).resolve().is_relative_to(_HVDTRAIN)]
    if others == path:
        yield
        return
    answers = _take_modules()
    sys.path[:] = others
    try:
        yield
    finally:
        sys.path[:] = path
        _take_modules()
        sys.modules.update(answers)


def _take_modules() -> dict[str, ModuleType]:
    """Remove what is loaded under Horovod's names, and return it."""
    names = [name for name in sys.modules if name.partition(".")[0] == "horovod"]
    return {name: sys.modules.pop(name) for name in names}
