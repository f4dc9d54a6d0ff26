"""Import of the installed Horovod, where hvdtrain provides its own `horovod` modules."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import hvdtrain

_HVDTRAIN = Path(hvdtrain.__file__).resolve().parent


@contextmanager
def installed_horovod() -> Iterator[None]:
    """Return a context in which `import horovod` imports the installed package."""
    path = sys.path[:]
    others = [entry for entry in path if not Path(entry).resolve().is_relative_to(_HVDTRAIN)]
    if others == path:
        yield
        return
    provided = _take_modules()
    sys.path[:] = others
    try:
        yield
    finally:
        sys.path[:] = path
        _take_modules()
        sys.modules.update(provided)


def _take_modules() -> dict[str, ModuleType]:
    """Remove the modules named horovod and below from sys.modules, and return them."""
    names = [name for name in sys.modules if name.partition(".")[0] == "horovod"]
    return {name: sys.modules.pop(name) for name in names}
