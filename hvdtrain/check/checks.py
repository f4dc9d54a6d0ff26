"""The sections of `hvdtrain check`, in the order in which they are reported."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TypedDict

from hvdtrain import __version__
from hvdtrain.check.machine import check_cores, check_memory
from hvdtrain.check.mpi import check_engines, check_mpi, check_trial
from hvdtrain.check.probe import ProbeError, Section, ask_python, finish, guarded
from hvdtrain.compiled.library import find_compiler
from hvdtrain.config import Config
from hvdtrain.errors import UsageError

# What needs a compiler: the framework that it is for, or "", and what it is.
_NEEDED_BY = (
    ("torch", "the allocator of PyTorch's gradients, which are else copied into buckets"),
    ("tensorflow", "the allocator of TensorFlow's gradients, which are else copied into buckets"),
    ("torch", "train --compile inductor"),
    ("", "build-horovod"),
)


def check_compiler() -> Section:
    """Report which compiler there is and what needs one; training itself does not."""
    needed_by = [
        what for module, what in _NEEDED_BY if not module or importlib.util.find_spec(module)
    ]
    facts: dict[str, object] = {"command": None, "needed_by": needed_by}
    try:
        facts["command"] = line = shlex.join(find_compiler(os.environ))
    except UsageError as error:
        line = str(error)
    return Section("compiler", facts, (line, *(f"needs a compiler: {what}" for what in needed_by)))


# Modules, and the names of the distributions that install them.
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
_NVIDIA = ("--query-gpu=name,memory.total", "--format=csv,noheader,nounits")


class _Gpu(TypedDict):
    name: str
    memory_bytes: int


def check_packages() -> Section:
    """Report the versions of the packages that matter here, without importing them."""
    facts = {module: _version(module) for module in _PACKAGES}
    there = [f"{module} {found}" for module, found in facts.items() if found]
    absent = [module for module, found in facts.items() if not found]
    lines = [", ".join(there)] if there else []
    if absent:
        lines.append(f"not installed: {', '.join(absent)}")
    return Section("packages", facts, tuple(lines))


def check_frameworks() -> Section:
    """Report whether the frameworks that are installed can be loaded."""
    facts: dict[str, dict[str, object]] = {}
    lines, problems = [], []
    for name in filter(_version, _FRAMEWORKS):
        try:
            facts[name] = ask_python("-m", "hvdtrain.probes", "framework", name)
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
    """Report the GPUs that the driver knows, and how many of them each framework sees."""
    gpus = _driver_gpus()
    answers = {name: found for name, found in frameworks.facts.items() if isinstance(found, dict)}
    seen = {name: found.get("gpus") for name, found in answers.items()}
    facts = {"gpus": gpus, "seen": seen}
    if not gpus and not any(seen.values()):
        return Section("GPUs", facts, ("none",))
    lines = [f"{gpu['name']}, {gpu['memory_bytes'] / 2**30:.0f} GiB" for gpu in gpus]
    lines += [f"{name} sees {count or 'none'}" for name, count in seen.items()]
    return Section("GPUs", facts, tuple(lines))


def _driver_gpus() -> list[_Gpu]:
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
    """Return the version of an installed module, "unknown" if it has no metadata, else None."""
    for name in _PACKAGES[module]:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown" if importlib.util.find_spec(module) else None


def all_sections(engines: Sequence[str]) -> Iterator[Section]:
    """Run all checks, and yield each section as soon as it is known."""
    yield guarded("python", check_python)
    yield guarded("packages", check_packages)
    settings = guarded("settings", partial(check_settings, engines))
    yield settings
    mpi = guarded("MPI", check_mpi)
    yield mpi
    ready = guarded("engines", partial(check_engines, engines, bool(mpi.problems)))
    yield ready
    frameworks = guarded("frameworks", check_frameworks)
    yield frameworks
    yield guarded("GPUs", partial(check_gpus, frameworks))
    yield guarded("cores", check_cores)
    yield guarded("memory", check_memory)
    yield guarded("compiler", check_compiler)
    yield guarded("trial", partial(check_trial, settings, mpi, ready))


def check_python() -> Section:
    """Report the interpreter and hvdtrain's version."""
    number = ".".join(map(str, sys.version_info[:3]))
    facts = {"hvdtrain": __version__, "version": number, "executable": sys.executable}
    return Section("python", facts, (f"{number} ({sys.executable})",))


def check_settings(engines: Sequence[str]) -> Section:
    """Report the HVDTRAIN_* variables."""
    given = {name: text for name, text in os.environ.items() if name.startswith("HVDTRAIN_")}
    lines = tuple(f"{name}={text}" for name, text in sorted(given.items())) or ("none",)
    try:
        engine = Config.from_environ(os.environ).engine
    except UsageError as error:
        return Section("settings", given, lines, (f"{error}: set another, or unset it",))
    problems = []
    if engine not in ("auto", *engines):
        problems.append(f"HVDTRAIN_ENGINE={engine}: set one of {', '.join(['auto', *engines])}")
    if engine == "local":
        problems.append("HVDTRAIN_ENGINE=local leaves every rank alone: unset it")
    return Section("settings", given, lines, tuple(problems))
