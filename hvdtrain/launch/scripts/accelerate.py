"""What Accelerate's own launcher would tell a script: from its YAML file, and without a GPU."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any

from hvdtrain.errors import UsageError

__all__ = ["Settings", "accelerate_variables", "default_file", "has_gpu", "read_file", "remarks"]

USE_CPU, MIXED_PRECISION = "ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION"

# Of NVIDIA, AMD, WSL, Intel and others.
_DEVICES = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg", "/dev/dri/renderD*", "/dev/accel/*")


@dataclass(frozen=True)
class Settings:
    """What matters here in a file that `accelerate config` has written.

    Attributes:
        source: path of the file.
        num_processes: number of ranks that it asks for; None if it does not say.
        use_cpu: whether GPUs are left alone.
        mixed_precision: "no", "fp16", "bf16" or "fp8"; None if it does not say.
    """

    source: Path
    num_processes: int | None = None
    use_cpu: bool = False
    mixed_precision: str | None = None


def default_file(environ: Mapping[str, str]) -> Path | None:
    """Return the file that `accelerate config` writes without a name, if it is there."""
    # A user without a name may have no home.
    cache = environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(environ.get("HF_HOME") or Path(cache) / "huggingface")
    path = folder / "accelerate" / "default_config.yaml"
    return path if path.is_file() else None


def read_file(path: Path) -> Settings:
    """Return the settings in a file.

    Raises:
        UsageError: it cannot be read, is no such file, or PyYAML is missing.
    """
    try:
        yaml = importlib.import_module("yaml")
    except ImportError:
        raise UsageError(f"to read {path}, PyYAML is needed: pip install pyyaml") from None
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path}: expected the lines KEY: VALUE that `accelerate config` writes")
    return Settings(
        path,
        _count(path, found),
        found.get("use_cpu") is True,
        _precision(found.get("mixed_precision")),
    )


def _count(path: Path, found: Mapping[str, Any]) -> int | None:
    count = found.get("num_processes")
    if count is not None and (not isinstance(count, int) or count < 1):
        raise UsageError(f"{path}: num_processes: {count!r} must be an integer of at least 1")
    return count


def _precision(value: object) -> str | None:
    # An unquoted `no` is a boolean of YAML.
    return None if value is None else "no" if value is False else str(value)


def has_gpu(environ: Mapping[str, str]) -> bool:
    """Return whether this host has a GPU, or another accelerator, that a script may use."""
    if environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    return any(glob(pattern) for pattern in _DEVICES)


def accelerate_variables(settings: Settings | None, gpu: bool) -> dict[str, str]:
    """Return the variables in which Accelerate looks for its settings.

    Without a GPU it takes part in no world unless it is told to use the CPU.

    Args:
        settings: those of a file, if there is one.
        gpu: whether this host has a GPU.
    """
    variables = {}
    if not gpu or (settings is not None and settings.use_cpu):
        variables[USE_CPU] = "true"
    if settings is not None and settings.mixed_precision is not None:
        variables[MIXED_PRECISION] = settings.mixed_precision
    return variables


def remarks(settings: Settings, size: int, gpu: bool) -> list[str]:
    """Return in which points a file is not followed.

    Args:
        settings: those of the file.
        size: number of ranks.
        gpu: whether this host has a GPU.
    """
    found = []
    asked = settings.num_processes
    if asked is not None and asked != size:
        found.append(
            f"{settings.source}: num_processes: {asked}, but there are {size} ranks: mpirun's -np "
            "decides"
        )
    if not gpu and not settings.use_cpu:
        found.append(f"{settings.source}: use_cpu: false, but there is no GPU: ranks use the CPU")
    if not gpu and settings.mixed_precision == "fp16":
        found.append(
            f"{settings.source}: mixed_precision: fp16 needs a GPU: write bf16 or no for the CPU"
        )
    return found
