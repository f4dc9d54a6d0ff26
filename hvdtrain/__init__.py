"""All-reduce training on MPI with Horovod's interface.

This package loads neither MPI nor a framework: `import hvdtrain.torch` does.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["__version__", "run"]

__version__ = "0.3.0"


def __getattr__(name: str) -> Any:
    # The launcher belongs to a layer above this one, so it is imported only when it is used.
    if name == "run":
        return importlib.import_module("hvdtrain.launch.calls.call").run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
