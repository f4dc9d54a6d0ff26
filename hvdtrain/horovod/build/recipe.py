"""What is built, with which tools and settings, and the name of the result. Pure."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

HOROVOD_VERSION = "0.28.1"
# Incremented when a change of this recipe changes the wheel.
_RECIPE = 2

# setup.py needs Horovod's own requirements even if it only builds.
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
    def frameworks(self) -> str:
        """The frameworks with their versions, as text."""
        versions = {"torch": self.torch, "tensorflow": self.tensorflow}
        return " and ".join(f"{name} {version}" for name, version in versions.items() if version)

    @property
    def key(self) -> str:
        """Unique, readable name of the target."""
        facts = json.dumps(asdict(self), sort_keys=True).encode()
        parts = [self.horovod, f"torch{self.torch}" if self.torch else ""]
        parts += [f"tensorflow{self.tensorflow}" if self.tensorflow else "", self.mpi, self.python]
        return "-".join([*filter(None, parts), blake2b(facts, digest_size=6).hexdigest()])


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return the directory of this user's wheels and logs."""
    base = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "~")).expanduser() / ".cache"
    return Path(base) / "hvdtrain" / "horovod"


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


def tools(with_cmake: bool) -> list[str]:
    """Return the requirements of the build."""
    return [*_TOOLS, *([_CMAKE] if with_cmake else [])]


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
