"""`horovod.common.util`: what scripts ask before they start, and a helper. All are local."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

import torch

from hvdtrain.torch.builds import ccl_built, ddl_built, gloo_built, mpi_built, nccl_built

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


def extension_available(framework: str, verbose: bool = False) -> bool:
    """Tell whether a framework ("torch") is installed and hvdtrain has an adapter for it."""
    names = (f"hvdtrain.{framework}", framework)
    return all(importlib.util.find_spec(name) is not None for name in names)


def gpu_available(framework: str, verbose: bool = False) -> bool:
    """Tell whether a framework ("torch") sees a GPU."""
    return framework == "torch" and torch.cuda.is_available()


def split_list(items: Sequence[T], parts: int) -> list[Sequence[T]]:
    """Cut a sequence into parts as even as can be; the first ones are the larger ones."""
    length, longer = divmod(len(items), parts)
    bounds = [part * length + min(part, longer) for part in range(parts + 1)]
    return [items[start:end] for start, end in pairwise(bounds)]
