"""`horovod.common.util`: what scripts ask before they start, and helpers. All are local."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TypeVar

from hvdtrain.core.arguments import choose_op
from hvdtrain.core.horovod_api import ccl_built, ddl_built, mpi_built

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
    """Return whether torch brings Gloo."""
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
    """Return whether a framework ("torch", "tensorflow") is installed and has an adapter here."""
    names = (f"hvdtrain.{framework}", framework)
    return all(importlib.util.find_spec(name) is not None for name in names)


def gpu_available(framework: str, verbose: bool = False) -> bool:
    """Return whether a framework ("torch", "tensorflow") sees a GPU."""
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


@contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Set variables of the environment for a while; those that are None stay as they are."""
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
    """Return what chooses a reduction from the arguments op and (deprecated) average."""
    return choose_op


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Return whether a version is at least `target`, which is major.minor.patch.

    Raises:
        ValueError: they are not strings of that form.
    """
    if not all(isinstance(text, str) for text in (ver, target)):
        raise ValueError(f"versions must be strings, got {ver!r} and {target!r}")
    if not re.fullmatch(r"\d+\.\d+\.\d+", target):
        raise ValueError(f"the version to compare with must be major.minor.patch, got {target!r}")
    match = re.match(r"v?(\d+(?:\.\d+)*)(.*)", ver)
    if match is None:
        raise ValueError(f"{ver!r} is no version")
    release = [int(part) for part in match[1].split(".")]
    wanted = [int(part) for part in target.split(".")]
    release += [0] * (len(wanted) - len(release))
    is_early = re.match(r"[._-]?(a|b|c|rc|alpha|beta|dev|pre)", match[2]) is not None
    return (release, not is_early) >= (wanted, True)
