"""The package that `import horovod` finds if hvdtrain replaces Horovod."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from hvdtrain.horovod.names.finder import HorovodFinder

__all__ = ["__version__", "run"]

# The version of Horovod whose interface this is.
__version__ = "0.28.1"

sys.meta_path.insert(0, HorovodFinder(sys.modules[__name__]))


def __getattr__(name: str) -> Any:
    # Imported only when needed: training needs no launcher.
    if name == "run":
        return importlib.import_module("horovod.runner").run
    if name == "runner":
        return importlib.import_module("horovod.runner")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
