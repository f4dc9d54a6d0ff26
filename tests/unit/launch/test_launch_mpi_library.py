"""Finding the mpirun that belongs to an MPI library, among launchers that only say a version."""

import sys
from pathlib import Path

import pytest

from hvdtrain.launch.launchers.mpi_library import (
    MpiLibrary,
    find_mpirun,
    launcher_version,
)

OPEN_MPI_5 = "mpirun (Open MPI) 5.0.11"
OPEN_MPI_4 = "mpirun (Open MPI) 4.1.4"
HYDRA_4 = "HYDRA build details:\n    Version:                                 4.0.2"
INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.9 Build 20230307"


@pytest.fixture
def empty_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Leave one folder in which a launcher can be found: the one that is returned."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nowhere" / "python"))
    return tmp_path


def install(path: Path, says: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n/bin/cat <<'END'\n{says}\nEND\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("says", "version"),
    [
        *((OPEN_MPI_5, ("openmpi", "5.0.11")), (OPEN_MPI_4, ("openmpi", "4.1.4"))),
        *((HYDRA_4, ("mpich", "4.0.2")), (INTEL, ("intelmpi", "2021.9"))),
        ("mpirun of somebody else 3.0", None),
    ],
)
def test_what_a_launcher_says(tmp_path: Path, says: str, version: tuple[str, str] | None) -> None:
    assert launcher_version(install(tmp_path / "mpirun", says)) == version


def test_the_prefix_of_the_library_comes_first(empty_path: Path) -> None:
    install(empty_path / "mpirun", OPEN_MPI_5)
    own = install(empty_path / "prefix" / "bin" / "mpirun", OPEN_MPI_5)
    library = MpiLibrary("openmpi", "5.0.10", empty_path / "prefix" / "lib" / "libmpi.so.40")
    assert find_mpirun(library) == own
