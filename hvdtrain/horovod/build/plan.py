"""The plan of a build, decided before anything is built: the target, the cache and the tools."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import blake2b
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import TypeVar

from hvdtrain.compiled import find_compiler
from hvdtrain.errors import UsageError
from hvdtrain.launch.launchers.mpi_library import MpiLibrary, find_mpirun, loaded_library, programs

HOROVOD_VERSION = "0.28.1"
# Incremented when a change of this recipe changes the wheel.
_RECIPE = 2

# setup.py needs Horovod's own requirements even if it only builds.
TOOLS = (
    "setuptools==84.2.1",
    "wheel==0.48.0",
    "packaging==26.3",
    "cffi==2.1.1",
    "cloudpickle==3.1.2",
    "psutil==7.2.2",
    "pyyaml==6.0.3",
)
CMAKE = "cmake==4.4.4"

# Horovod's own variables for its build; the others are for its runs.
_CHOICES = re.compile(r"HOROVOD_(GPU|CPU_OPERATIONS|CUDA|NCCL|ROCM|BUILD|DEBUG|ALLOW|CCL)")


@dataclass(frozen=True)
class Target:
    """Everything that determines the wheel."""

    torch: str
    tensorflow: str
    mpi: str
    runpath: str
    python: str
    platform: str
    cuda: bool
    choices: Mapping[str, str]
    horovod: str = HOROVOD_VERSION
    recipe: int = _RECIPE

    @property
    def frameworks(self) -> dict[str, str]:
        """The version of each framework that the wheel is for."""
        versions = {"torch": self.torch, "tensorflow": self.tensorflow}
        return {name: version for name, version in versions.items() if version}

    @property
    def key(self) -> str:
        """Unique, readable name of the target."""
        facts = json.dumps(asdict(self), sort_keys=True).encode()
        frameworks = [f"{name}{version}" for name, version in self.frameworks.items()]
        digest = blake2b(facts, digest_size=6).hexdigest()
        return "-".join([self.horovod, *frameworks, self.mpi, self.python, digest])


def choices(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the user's settings for Horovod's build."""
    return {name: text for name, text in environ.items() if _CHOICES.match(name)}


def runpath(library: Path, packages: Path, prefix: Path, writable: bool) -> str:
    """Return the directory in which the built library looks for MPI.

    If MPI is in the environment or next to it, the path is relative to the library, so that one
    wheel serves environments with the same layout. Otherwise it is the directory of MPI.
    """
    beside = prefix.parent != Path(prefix.anchor) and library.is_relative_to(prefix.parent)
    if not (beside and writable):
        return str(library.parent)
    return "$ORIGIN/" + os.path.relpath(library.parent, packages / "horovod" / "torch")


def variables(target: Target, compiler: Path, cmake: Path, jobs: int) -> dict[str, str]:
    """Return the environment variables that Horovod's build reads."""
    frameworks = {"PYTORCH": target.torch, "TENSORFLOW": target.tensorflow, "MXNET": ""}
    return {
        "CXX": str(compiler),
        "HOROVOD_CMAKE": str(cmake),
        # CMake 4 refuses the old version that the bundled gloo requires.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        "MAKEFLAGS": f"-j{jobs}",
        "HOROVOD_WITH_MPI": "1",
        "HOROVOD_WITH_GLOO": "1",
        **{f"HOROVOD_WITH_{name}": "1" for name, version in frameworks.items() if version},
        **{f"HOROVOD_WITHOUT_{name}": "1" for name, version in frameworks.items() if not version},
    }


_Found = TypeVar("_Found")

_TIMEOUT_SECONDS = 60
_OLDEST_CMAKE = (3, 13)
_MPI_COMPILERS = ("mpicxx", "mpic++", "mpiCC")
_MPI_HEADER = "#include <mpi.h>\nhvdtrain OMPI_MAJOR_VERSION I_MPI_VERSION MPICH_VERSION\n"
_MPI_VENDORS = ("openmpi", "intelmpi", "mpich")


@dataclass(frozen=True)
class Toolchain:
    """The tools of a build."""

    compiler: tuple[str, ...]
    cmake: Path | None
    mpicxx: Path


def find_toolchain(
    mpi: MpiLibrary | None, environ: Mapping[str, str], known_faults: Sequence[str]
) -> Toolchain:
    """Find all tools of a build, or raise one error that names all that is missing."""
    faults = list(known_faults)
    compiler = _attempt(faults, lambda: _working_compiler(environ))
    _attempt(faults, lambda: _require_parts(environ))
    mpicxx = None
    if mpi is not None:
        mpicxx = _attempt(faults, partial(_find_mpicxx, mpi, compiler, environ))
    if faults or compiler is None or mpicxx is None:
        raise UsageError("Horovod cannot be built here:\n  " + "\n  ".join(faults))
    return Toolchain(compiler, _find_cmake(environ), mpicxx)


def _attempt(faults: list[str], find: Callable[[], _Found]) -> _Found | None:
    try:
        return find()
    except UsageError as error:
        faults.append(str(error))
        return None


def _working_compiler(environ: Mapping[str, str]) -> tuple[str, ...]:
    found = find_compiler(environ)
    check = ["-std=gnu++20", "-include", "cstdint", "-fsyntax-only", "-x", "c++", os.devnull]
    tried = _run([*found, *check], environ)
    if tried is None or tried.returncode != 0:
        raise UsageError(
            f"{found[0]} does not compile C++20: install GCC 10 or clang 12, and name it with CXX=…"
        )
    return found


def _require_parts(environ: Mapping[str, str]) -> None:
    missing = []
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        missing.append("no Python headers (Python.h): apt install python3-dev")
    if importlib.util.find_spec("ensurepip") is None:
        missing.append("this Python makes no environments: apt install python3-venv")
    if shutil.which("make", path=environ.get("PATH", "")) is None:
        missing.append("no make: apt install make")
    if missing:
        raise UsageError("\n  ".join(missing))


def _find_mpicxx(
    mpi: MpiLibrary, compiler: tuple[str, ...] | None, environ: Mapping[str, str]
) -> Path:
    """Return the driver whose mpi.h belongs to `mpi`; without a compiler it cannot be checked."""
    others = []
    for path in programs(mpi, _MPI_COMPILERS):
        found = None if compiler is None else _header_of(path, compiler, environ)
        if compiler is None or found == (mpi.vendor, mpi.major):
            return path
        others.append(f"{path} is for {' '.join(found) if found else 'nothing: it finds no mpi.h'}")
    seen = "; ".join(dict.fromkeys(others)) or f"no {' or '.join(_MPI_COMPILERS)}"
    raise UsageError(
        f"no MPI headers for {mpi} ({seen}): pip install {mpi.vendor}, or your system's package "
        "for development with that MPI"
    )


def _header_of(
    mpicxx: Path, compiler: tuple[str, ...], environ: Mapping[str, str]
) -> tuple[str, str] | None:
    """Return the vendor and the major version of the mpi.h that a driver finds."""
    names = ("OMPI_CXX", "MPICH_CXX", "I_MPI_CXX")
    own = {name: shlex.join(compiler) for name in names}
    asked = _run([str(mpicxx), "-E", "-P", "-x", "c++", "-"], {**environ, **own}, _MPI_HEADER)
    last = asked.stdout.split("\n") if asked and asked.returncode == 0 else [""]
    words = next((line.split()[1:] for line in reversed(last) if line.startswith("hvdtrain")), [])
    for vendor, word in zip(_MPI_VENDORS, words, strict=False):
        if match := re.match(r'"?(\d+)', word):
            return vendor, match[1]
    return None


def _find_cmake(environ: Mapping[str, str]) -> Path | None:
    path = shutil.which("cmake", path=environ.get("PATH", ""))
    asked = _run([path, "--version"], environ) if path else None
    match = re.search(r"version (\d+)\.(\d+)", asked.stdout) if asked else None
    if path is None or match is None or (int(match[1]), int(match[2])) < _OLDEST_CMAKE:
        return None
    return Path(path)


def _run(
    words: Sequence[str], environ: Mapping[str, str], text: str = ""
) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(
            words,
            env=dict(environ),
            input=text,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


@dataclass(frozen=True)
class BuildPlan:
    """The plan of one run of `build-horovod`."""

    target: Target
    folder: Path
    source: Path | Toolchain
    mpi: MpiLibrary
    mpirun: Path

    @property
    def log(self) -> Path:
        """File to which all commands write."""
        return self.folder.with_name(f"{self.folder.name}.log")


def make_plan(environ: Mapping[str, str], without: Collection[str], force: bool) -> BuildPlan:
    """Return the plan for this environment and the cache."""
    faults: list[str] = []
    versions = installed_versions({"torch", "tensorflow"}.difference(without))
    if not versions:
        faults.append(
            "neither torch nor tensorflow is installed (or both are left out): pip install "
            "'hvdtrain[torch]' first"
        )
    mpi = _attempt(faults, loaded_library)
    if mpi and mpi.path and "_abi" in mpi.path.name:
        faults.append(f"Horovod is not built for {mpi}: reinstall mpi4py from its wheel")
    mpirun = None if mpi is None else _attempt(faults, partial(find_mpirun, mpi))
    if mpi is None or mpirun is None or faults:
        find_toolchain(mpi, environ, faults)  # names all that is missing
        raise AssertionError("a fault has been found")
    target = _target(mpi, versions, environ)
    base = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "~")).expanduser() / ".cache"
    cache = Path(base) / "hvdtrain" / "horovod"
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"wheels cannot be kept in {cache} ({error.strerror}): set XDG_CACHE_HOME to a folder "
            "that you may write to"
        ) from error
    folder = cache / target.key
    wheel = None if force else next(folder.glob("horovod-*.whl"), None)
    return BuildPlan(target, folder, wheel or find_toolchain(mpi, environ, faults), mpi, mpirun)


def installed_versions(modules: Collection[str]) -> dict[str, str]:
    """Return the versions of those modules that are installed, without importing them."""
    there = [name for name in modules if importlib.util.find_spec(name) is not None]
    providers = packages_distributions() if there else {}
    return {name: version(providers[name][0]) for name in there if name in providers}


def _target(mpi: MpiLibrary, versions: Mapping[str, str], environ: Mapping[str, str]) -> Target:
    packages = Path(sysconfig.get_path("platlib"))
    torch = versions.get("torch", "")
    nvcc = environ.get("CUDA_HOME") or shutil.which("nvcc", path=environ.get("PATH", ""))
    return Target(
        torch=torch,
        tensorflow=versions.get("tensorflow", ""),
        mpi=f"{mpi.vendor}{mpi.major}",
        runpath=runpath(
            mpi.path or Path(sys.prefix, "lib"),
            packages,
            Path(sys.prefix),
            os.access(packages, os.W_OK),
        ),
        python=str(sys.implementation.cache_tag),
        platform=sysconfig.get_platform(),
        cuda=bool(torch and nvcc and not torch.endswith("+cpu")),
        choices=choices(environ),
    )
