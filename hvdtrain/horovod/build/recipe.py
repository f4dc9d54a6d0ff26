"""What is built, with which tools and settings, and the name of the result. Pure."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

__all__ = ["HOROVOD_VERSION", "Target", "cache_folder", "choices", "runpath", "tools", "variables"]

HOROVOD_VERSION = "0.28.1"
# Counts changes of this recipe that change what it builds.
_RECIPE = 2

# setup.py asks for Horovod's own requirements even where it only builds.
_TOOLS = (
    "setuptools==84.2.1",
    "wheel==0.48.0",
    "packaging==26.3",
    "cffi==2.1.1",
    "cloudpickle==3.1.2",
    "psutil==7.2.2",
    "pyyaml==6.0.3",
)
_CMAKE = "cmake==4.4.4"

# Horovod's own variables for its build; the others are for its runs.
_CHOICES = re.compile(r"HOROVOD_(GPU|CPU_OPERATIONS|CUDA|NCCL|ROCM|BUILD|DEBUG|ALLOW|CCL)")


@dataclass(frozen=True)
class Target:
    """All that decides about the wheel.

    Attributes:
        torch: its version, "" where Horovod is built without it.
        tensorflow: its version, "" where Horovod is built without it.
        mpi: vendor and major version, e.g. "openmpi5".
        runpath: where the library looks for MPI.
        python: e.g. "cpython-311".
        platform: e.g. "linux-x86_64".
        cuda: whether there is a CUDA compiler, which torch's CUDA build makes Horovod use.
        choices: the user's settings of Horovod's build.
        horovod: its version.
        recipe: that of this file.
    """

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
    def frameworks(self) -> str:
        """The frameworks, for people."""
        versions = {"torch": self.torch, "tensorflow": self.tensorflow}
        return " and ".join(f"{name} {version}" for name, version in versions.items() if version)

    @property
    def key(self) -> str:
        """Name that is equal exactly for equal targets, and tells people most of it."""
        facts = json.dumps(asdict(self), sort_keys=True).encode()
        parts = [self.horovod, f"torch{self.torch}" if self.torch else ""]
        parts += [f"tensorflow{self.tensorflow}" if self.tensorflow else "", self.mpi, self.python]
        return "-".join([*filter(None, parts), blake2b(facts, digest_size=6).hexdigest()])


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return where wheels and logs are kept for this user."""
    base = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "~")).expanduser() / ".cache"
    return Path(base) / "hvdtrain" / "horovod"


def choices(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the user's settings of Horovod's build."""
    return {name: text for name, text in environ.items() if _CHOICES.match(name)}


def runpath(library: Path, packages: Path, prefix: Path, writable: bool) -> str:
    """Return where the built library looks for MPI.

    Where MPI lies in the environment or beside it, relative to the library's own place: so a
    wheel serves environments that look alike. Else the folder of MPI.

    Args:
        library: the file of MPI's library.
        packages: the environment's site-packages.
        prefix: the environment.
        writable: whether pip will install into `packages` at all.
    """
    beside = prefix.parent != Path(prefix.anchor) and library.is_relative_to(prefix.parent)
    if not (beside and writable):
        return str(library.parent)
    return "$ORIGIN/" + os.path.relpath(library.parent, packages / "horovod" / "torch")


def tools(with_cmake: bool) -> list[str]:
    """Return the requirements of the build."""
    return [*_TOOLS, *([_CMAKE] if with_cmake else [])]


def variables(target: Target, compiler: Path, cmake: Path, jobs: int) -> dict[str, str]:
    """Return the environment variables that Horovod's build reads.

    Args:
        target: what to build.
        compiler: the wrapper.
        cmake: CMake 3.13 or newer.
        jobs: how many compilers to run at once.
    """
    frameworks = {"PYTORCH": target.torch, "TENSORFLOW": target.tensorflow, "MXNET": ""}
    return {
        "CXX": str(compiler),
        "HOROVOD_CMAKE": str(cmake),
        # CMake 4 refuses the age that the copy of gloo inside claims.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        "MAKEFLAGS": f"-j{jobs}",
        "HOROVOD_WITH_MPI": "1",
        "HOROVOD_WITH_GLOO": "1",
        **{f"HOROVOD_WITH_{name}": "1" for name, version in frameworks.items() if version},
        **{f"HOROVOD_WITHOUT_{name}": "1" for name, version in frameworks.items() if not version},
    }
