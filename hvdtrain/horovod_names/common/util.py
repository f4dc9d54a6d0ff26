"""`horovod.common.util`: what scripts ask before they start, and a helper. All are local."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

from hvdtrain.core.builds import ccl_built, ddl_built, mpi_built

__all__ = [
    "ccl_built",
    "ddl_built",
    "extension_available",
    "gloo_built",
    "gpu_available",
    "mpi_built",
    "nccl_built",
    "split_list",
]

T = TypeVar("T")


def gloo_built() -> bool:
    """Tell whether torch brings Gloo."""
    return bool(_of_torch("gloo_built"))


def nccl_built() -> int:
    """Return NCCL's version as torch brings it, or 0."""
    return int(_of_torch("nccl_built"))


def _of_torch(name: str) -> int:
    # Scripts for TensorFlow ask as well, and torch takes seconds to load.
    if importlib.util.find_spec("torch") is None:
        return 0
    found: int = getattr(importlib.import_module("hvdtrain.torch.builds"), name)()
    return found


def extension_available(framework: str, verbose: bool = False) -> bool:
    """Tell whether a framework ("torch", "tensorflow") is installed and has an adapter here."""
    names = (f"hvdtrain.{framework}", framework)
    return all(importlib.util.find_spec(name) is not None for name in names)


def gpu_available(framework: str, verbose: bool = False) -> bool:
    """Tell whether a framework ("torch", "tensorflow") sees a GPU."""
    if framework == "torch":
        return bool(importlib.import_module("torch").cuda.is_available())
    if framework == "tensorflow":
        return bool(importlib.import_module("tensorflow").config.list_physical_devices("GPU"))
    return False


def split_list(items: Sequence[T], parts: int) -> list[Sequence[T]]:
    """Cut a sequence into parts as even as can be; the first ones are the larger ones."""
    length, longer = divmod(len(items), parts)
    bounds = [part * length + min(part, longer) for part in range(parts + 1)]
    return [items[start:end] for start, end in pairwise(bounds)]
