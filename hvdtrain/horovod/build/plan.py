"""The plan of a build, decided before anything is built: the target, the cache and the tools."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import packages_distributions, version
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.horovod.build.recipe import Target, cache_folder, choices, runpath
from hvdtrain.horovod.build.toolchain import Toolchain, find_toolchain
from hvdtrain.launch.launchers.mpi_library import MpiLibrary, find_mpirun, loaded_library

FRAMEWORKS = ("torch", "tensorflow")


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
    versions = installed_versions([name for name in FRAMEWORKS if name not in without])
    if not versions:
        faults.append(
            "neither torch nor tensorflow is installed (or both are left out): pip install "
            "'hvdtrain[torch]' first"
        )
    mpi = mpirun = None
    try:
        mpi = loaded_library()
        mpirun = find_mpirun(mpi)
    except UsageError as error:
        faults.append(str(error))
    if mpi is None or mpirun is None or faults:
        find_toolchain(mpi, environ, faults)  # names all that is missing
        raise AssertionError("a fault has been found")
    target = _target(mpi, versions, environ)
    folder = _writable(cache_folder(environ)) / target.key
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


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"wheels cannot be kept in {folder} ({error.strerror}): set XDG_CACHE_HOME to a "
            "folder that you may write to"
        ) from error
    return folder
