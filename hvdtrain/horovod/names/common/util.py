"""`horovod.common.util`: queries of what is available, and helpers. All are local."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TypeVar

from hvdtrain.core.horovod_api import ccl_built, ddl_built, mpi_built
from hvdtrain.core.operations import choose_op

__all__ = [
    "ccl_built",
    "ddl_built",
    "env",
    "extension_available",
    "get_average_backwards_compatibility_fun",
    "gloo_built",
    "gpu_available",
    "is_version_greater_equal_than",
    "mpi_built",
    "nccl_built",
    "split_list",
]

T = TypeVar("T")


def gloo_built() -> bool:
    """Return whether torch is built with Gloo."""
    return bool(_of_torch("gloo_built"))


def nccl_built() -> int:
    """Return the version of NCCL in torch, or 0."""
    return int(_of_torch("nccl_built"))


def _of_torch(name: str) -> int:
    # Scripts for TensorFlow call it too, and torch takes seconds to import.
    if importlib.util.find_spec("torch") is None:
        return 0
    found: int = getattr(importlib.import_module("hvdtrain.torch"), name)()
    return found


def extension_available(framework: str, verbose: bool = False) -> bool:
    """Return whether a framework is installed and has an adapter here.

    Args:
        framework: "torch" or "tensorflow".
        verbose: ignored, for compatibility.
    """
    names = (f"hvdtrain.{framework}", framework)
    return all(importlib.util.find_spec(name) is not None for name in names)


def gpu_available(framework: str, verbose: bool = False) -> bool:
    """Return whether a framework finds a GPU.

    Args:
        framework: "torch" or "tensorflow".
        verbose: ignored, for compatibility.
    """
    if framework == "torch":
        return bool(importlib.import_module("torch").cuda.is_available())
    if framework == "tensorflow":
        return bool(importlib.import_module("tensorflow").config.list_physical_devices("GPU"))
    return False


def split_list(items: Sequence[T], parts: int) -> list[Sequence[T]]:
    """Split a sequence into parts whose lengths differ by one at most, the longer ones first.

    Args:
        items: sequence to split.
        parts: number of parts.
    """
    length, longer = divmod(len(items), parts)
    bounds = [part * length + min(part, longer) for part in range(parts + 1)]
    return [items[start:end] for start, end in pairwise(bounds)]


@contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Set environment variables within a block; those that are None are left unchanged."""
    given = {name: value for name, value in variables.items() if value is not None}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[Any, Any], Any]:
    """Return the function that chooses a reduction from op and the deprecated average."""
    return choose_op


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Return whether a version is at least another one.

    Args:
        ver: version.
        target: version to compare with, as major.minor.patch.

    Raises:
        ValueError: an argument is not a string of that form.
    """
    if not all(isinstance(text, str) for text in (ver, target)):
        raise ValueError(f"versions must be strings, got {ver!r} and {target!r}")
    if not re.fullmatch(r"\d+\.\d+\.\d+", target):
        raise ValueError(f"the version to compare with must be major.minor.patch, got {target!r}")
    match = re.match(r"v?(\d+(?:\.\d+)*)(.*)", ver)
    if match is None:
        raise ValueError(f"{ver!r} is not a version")
    release = [int(part) for part in match[1].split(".")]
    wanted = [int(part) for part in target.split(".")]
    release += [0] * (len(wanted) - len(release))
    is_early = re.match(r"[._-]?(a|b|c|rc|alpha|beta|dev|pre)", match[2]) is not None
    return (release, not is_early) >= (wanted, True)
