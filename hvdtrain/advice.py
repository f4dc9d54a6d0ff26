"""What messages about wrong input advise: the name that was meant, the version to install."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

from hvdtrain.errors import UsageError


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ": did you mean NAME?" for the nearest known name; "" if none is near."""
    near = nearest_name(name, known)
    return f": did you mean {near}?" if near else ""


def nearest_name(name: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """Return the known name that is most like another one; None if none is near."""
    return next(iter(get_close_matches(name, list(known), 1, likeness)), None)


def require_version(need: str, package: str, found: str, oldest: str) -> None:
    """Check the version of a framework."""
    least = _numbers(oldest)
    if _numbers(found)[: len(least)] < least:
        raise UsageError(f"{need} >= {oldest}, found {found}: pip install '{package}>={oldest}'")


def mpi_remedy(reason: str, usual: str) -> str:
    """Return what to do where mpi4py loads no MPI library, by the error that it gives."""
    if "libmpi_abi" in reason:
        return "it is built for MPI's standard ABI: pip install 'mpich>=5', or reinstall mpi4py"
    if "cannot import name 'MPI'" in reason:
        return (
            "it is not built for this library's ABI: name another library, or build it with "
            "MPI4PY_BUILD_MPIABI=1 MPICC=mpicc_abi pip install --force-reinstall --no-binary "
            "mpi4py mpi4py"
        )
    return usual


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]
