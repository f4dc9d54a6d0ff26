"""Which packages are installed, whether the frameworks load, and which GPUs they see."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hvdtrain.check.probe import ProbeError, ask_python, finish
from hvdtrain.check.section import Section

__all__ = ["check_frameworks", "check_gpus", "check_packages"]

# Modules, and the names under which they can be installed.
_PACKAGES: Mapping[str, tuple[str, ...]] = {
    "mpi4py": ("mpi4py",),
    "numpy": ("numpy",),
    "torch": ("torch",),
    "tensorflow": ("tensorflow", "tensorflow-cpu"),
    "keras": ("keras",),
    "jax": ("jax",),
    "horovod": ("horovod",),
}
_FRAMEWORKS = ("torch", "tensorflow", "jax")
_LOAD = """
import importlib, json, sys
name = sys.argv[1]
module = importlib.import_module(name)
if name == "torch":
    gpus = module.cuda.device_count() if module.cuda.is_available() else 0
elif name == "tensorflow":
    gpus = len(module.config.list_physical_devices("GPU"))
else:
    gpus = sum(device.platform == "gpu" for device in module.devices())
print(json.dumps({"version": module.__version__, "gpus": gpus}))
"""
_NVIDIA = ("--query-gpu=name,memory.total", "--format=csv,noheader,nounits")


def check_packages() -> Section:
    """The versions of what matters here, without loading any of it."""
    facts = {module: _version(module) for module in _PACKAGES}
    there = [f"{module} {found}" for module, found in facts.items() if found]
    absent = [module for module, found in facts.items() if not found]
    lines = [", ".join(there)] if there else []
    if absent:
        lines.append(f"not installed: {', '.join(absent)}")
    return Section("packages", facts, tuple(lines))


def check_frameworks() -> Section:
    """Whether the frameworks that are installed can be loaded."""
    facts: dict[str, Any] = {}
    lines, problems = [], []
    for name in filter(_version, _FRAMEWORKS):
        try:
            facts[name] = ask_python(_LOAD, name)
            lines.append(f"{name} {facts[name]['version']} loads")
        except ProbeError as error:
            facts[name] = {"error": str(error)}
            lines.append(f"{name} does not load")
            problems.append(f"{name} does not load ({error}): reinstall it in this environment")
    if not facts:
        lines.append("none")
        problems.append("no framework is installed: pip install 'hvdtrain[torch]'")
    return Section("frameworks", facts, tuple(lines), tuple(problems))


def check_gpus(frameworks: Section) -> Section:
    """The GPUs that the driver knows, and how many of them each framework sees."""
    gpus = _driver_gpus()
    seen = {name: found.get("gpus") for name, found in frameworks.facts.items()}
    facts = {"gpus": gpus, "seen": seen}
    if not gpus and not any(seen.values()):
        return Section("GPUs", facts, ("none",))
    lines = [f"{gpu['name']}, {gpu['memory_bytes'] / 2**30:.0f} GiB" for gpu in gpus]
    lines += [f"{name} sees {count or 'none'}" for name, count in seen.items()]
    return Section("GPUs", facts, tuple(lines))


def _driver_gpus() -> list[dict[str, Any]]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        done = finish([tool, *_NVIDIA], 30)
    except ProbeError:
        return []
    rows = [line.rpartition(",") for line in done.stdout.splitlines()]
    return [
        {"name": name.strip(), "memory_bytes": int(mebibytes) << 20}
        for name, _, mebibytes in rows
        if name and mebibytes.strip().isdecimal()
    ]


def _version(module: str) -> str | None:
    """Return the version of an installed module; "unknown" where only its files are there."""
    for name in _PACKAGES[module]:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown" if importlib.util.find_spec(module) else None
