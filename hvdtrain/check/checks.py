"""What `hvdtrain check` looks at, section by section."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain import __version__
from hvdtrain.check.machine import find_cores, find_shared_memory
from hvdtrain.check.packages import check_frameworks, check_gpus, check_packages
from hvdtrain.check.probe import ProbeError, ask_python
from hvdtrain.check.section import Section, guarded
from hvdtrain.check.trial import try_two_ranks
from hvdtrain.config import Config
from hvdtrain.errors import UsageError
from hvdtrain.launch.launchers.mpi_library import MpiLibrary, find_mpirun, loaded_library
from hvdtrain.memory import Memory, find_memory

__all__ = ["all_sections"]

# Each in a process of its own, and each as a world of one.
_INIT = """
import ctypes, json
from hvdtrain.engines.mpi.gpu_support import gpu_kinds
from mpi4py import MPI
names = ("single", "funneled", "serialized", "multiple")
levels = {getattr(MPI, "THREAD_" + name.upper()): name for name in names}
gpu_memory = gpu_kinds(ctypes.CDLL(MPI.__file__))
print(json.dumps({"threads": levels[MPI.Query_thread()], "gpu_memory": gpu_memory}))
"""
_ENGINE = """
import json, os, sys
from hvdtrain.config import Config
from hvdtrain.engines.registry import open_world
from hvdtrain.errors import HvdtrainError
try:
    world = open_world(sys.argv[1], Config(), os.environ)
except HvdtrainError as error:
    print(json.dumps({"available": False, "reason": str(error)}))
else:
    print(json.dumps({"available": True, "library": world.library}))
    world.communicator.close()
"""
_KERNEL = """
import json
from hvdtrain.engines.shared_memory.kernel import kernel_objection
print(json.dumps({"objection": kernel_objection()}))
"""
_LITTLE_SHM_BYTES = 64 << 20
_TOO_FEW = ", but process sets need multiple: unset MPI4PY_RC_THREAD_LEVEL, or use another MPI"


def all_sections(engines: Sequence[str]) -> Iterator[Section]:
    """Look at everything, and yield each section as soon as it is known.

    Args:
        engines: names of the engines that there are.
    """
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
    yield guarded("trial", partial(check_trial, settings, mpi, ready))


def check_python() -> Section:
    """The interpreter, and hvdtrain itself."""
    number = ".".join(map(str, sys.version_info[:3]))
    facts = {"hvdtrain": __version__, "version": number, "executable": sys.executable}
    return Section("python", facts, (f"{number} ({sys.executable})",))


def check_settings(engines: Sequence[str]) -> Section:
    """The HVDTRAIN_* variables."""
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


def check_mpi() -> Section:
    """The MPI library that is loaded, whether it starts, and the mpirun that belongs to it."""
    try:
        library = loaded_library()
    except UsageError as error:
        problem = str(error)
        if named := os.environ.get("MPI4PY_LIBMPI"):
            problem += f"; MPI4PY_LIBMPI={named} names it: unset that, or correct it"
        return Section("MPI", {"library": None}, ("no library",), (problem,))
    except subprocess.TimeoutExpired:
        problem = "loading MPI takes more than a minute: reinstall it, or name another library in "
        return Section("MPI", {"library": None}, ("hangs",), (f"{problem}MPI4PY_LIBMPI",))
    facts: dict[str, Any] = {
        "vendor": library.vendor,
        "version": library.version,
        "library": str(library.path) if library.path else None,
    }
    lines, problems = [str(library)], []
    try:
        facts |= ask_python(_INIT)
        lines.append(f"threads: {facts['threads']}" + _TOO_FEW * (facts["threads"] != "multiple"))
        lines.append(f"GPU memory: {_gpu_memory(library, facts['gpu_memory'])}")
    except ProbeError as error:
        problems.append(
            f"{library} does not start ({error}): reinstall it, or name another library in "
            "MPI4PY_LIBMPI"
        )
    try:
        facts["mpirun"] = str(find_mpirun(library))
        lines.append(f"mpirun: {facts['mpirun']}")
    except UsageError as error:
        problems.append(str(error))
    return Section("MPI", facts, tuple(lines), tuple(problems))


def _gpu_memory(library: MpiLibrary, kinds: Sequence[str]) -> str:
    """Return whether engine mpi hands memory of GPUs to MPI as it is."""
    if kinds:
        return f"yes ({' and '.join(kinds)})"
    return f"no ({library.name} {library.version} says that it takes neither CUDA's nor ROCm's)"


def check_engines(engines: Sequence[str], mpi_is_broken: bool) -> Section:
    """Whether each engine can be loaded, and why not."""
    facts = {name: _ask_engine(name) for name in engines}
    lines = [
        f"{name}: {'ready' if found['available'] else found['reason']}"
        for name, found in facts.items()
    ]
    chosen = os.environ.get("HVDTRAIN_ENGINE", "auto")
    needed = "mpi" if chosen == "auto" else chosen
    problems = []
    if needed in facts and not facts[needed]["available"] and not mpi_is_broken:
        problems.append(f"engine {needed} cannot be used: {facts[needed]['reason']}")
    return Section("engines", facts, tuple(lines), tuple(problems))


def _ask_engine(name: str) -> dict[str, Any]:
    try:
        found = ask_python(_ENGINE, name)
    except ProbeError as error:
        return {"available": False, "reason": f"it does not load ({error})"}
    if "reason" in found:
        found["reason"] = " ".join(found["reason"].split())
    return found


def check_cores() -> Section:
    """How many cores this process may use."""
    cores = find_cores()
    line = f"{cores.usable:g} of {cores.machine}"
    if cores.affinity < cores.machine:
        line += f"; bound to {cores.affinity}"
    if cores.limit is not None:
        line += f"; the control group allows {cores.limit:g}"
    return Section("cores", asdict(cores), (line,))


def check_memory() -> Section:
    """How much there is, and whether ranks of this machine can share it."""
    shared = find_shared_memory()
    facts, line = _memory()
    devshm = f"/dev/shm: {_mib(shared.free_bytes)} free of {_mib(shared.size_bytes)}"
    if shared.free_bytes < _LITTLE_SHM_BYTES:
        devshm += ", which is little for data loaders (docker run --shm-size=1g)"
    kernel = _ask_kernel()
    lines = (
        line,
        devshm,
        f"segments of ranks: {shared.objection or 'work'}",
        f"compiled kernel: {kernel or 'ready'}",
    )
    return Section("memory", {**facts, "shm": asdict(shared), "kernel": kernel}, lines)


def _memory() -> tuple[dict[str, int | None], str]:
    """Return what is known of this machine's memory, and a line about it."""
    try:
        memory = find_memory()
    except OSError as error:
        return dict.fromkeys(field.name for field in fields(Memory)), f"unknown: {error}"
    line = f"{_mib(memory.free_bytes)} free of {_mib(memory.machine_bytes)}"
    if memory.limit_bytes is not None:
        line += f"; the control group allows {_mib(memory.limit_bytes)}"
    return asdict(memory), line


def _ask_kernel() -> str:
    """Return why ranks add with numpy instead, or ""."""
    try:
        objection: str = ask_python(_KERNEL)["objection"]
    except ProbeError as error:
        return f"it does not load ({error}), so ranks of a node add with numpy"
    return objection and f"{objection}; until then ranks of a node add with numpy"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"


def check_trial(settings: Section, mpi: Section, engines: Section) -> Section:
    """A job of two ranks, where nothing that it needs is known to be wrong."""
    broken = [section.name for section in (settings, mpi, engines) if section.problems]
    if broken:
        reason = f"not tried, because of what is wrong with {' and '.join(broken)}"
        return Section("trial", {"passed": False, "reason": reason}, (reason,))
    path = mpi.facts["library"]
    library = MpiLibrary(mpi.facts["vendor"], mpi.facts["version"], Path(path) if path else None)
    shown, problem = try_two_ranks(Path(mpi.facts["mpirun"]), library)
    facts = {"passed": not problem, **shown}
    if problem:
        return Section("trial", facts | {"reason": problem}, ("failed",), (problem,))
    nodes = f"{shown['nodes']} node{'s' if shown['nodes'] > 1 else ''}"
    line = f"2 ranks with {shown['engine']} added right, on {nodes}, with {shown['cores']} cores"
    return Section("trial", facts, (line,))
