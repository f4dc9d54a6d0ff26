"""The installed Lightning, which is `lightning` or its older name `pytorch_lightning`."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

# The second has the same content under other names; objects of one are unknown to the other.
_FABRICS = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}


def load_pytorch() -> ModuleType:
    """Return the library that the program has imported already, else the first one installed."""
    loaded = [name for name in _FABRICS if name in sys.modules]
    for name in loaded or _FABRICS:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):
                raise
    raise ImportError("hvdtrain.lightning needs Lightning 2: pip install lightning")


def load_fabric(name: str) -> ModuleType:
    """Return a module of the Fabric that belongs to the library."""
    return importlib.import_module(f"{_FABRICS[PYTORCH.__name__]}.{name}")


def load_utilities(name: str) -> ModuleType:
    """Return a module of the library's utilities."""
    return importlib.import_module(f"{PYTORCH.__name__}.utilities.{name}")


PYTORCH = load_pytorch()
ClusterEnvironment: Any = load_fabric("plugins.environments").ClusterEnvironment
LayerSync: Any = PYTORCH.plugins.LayerSync
ParallelStrategy: Any = PYTORCH.strategies.ParallelStrategy
