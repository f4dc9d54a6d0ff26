"""The horovod engine: the core of the installed Horovod, over the MPI that mpi4py loads."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import hvdtrain
from hvdtrain.collective import collective
from hvdtrain.config import Config
from hvdtrain.engines.communicator import EngineWorld
from hvdtrain.engines.mpi import engine as mpi_engine
from hvdtrain.errors import EngineUnavailableError, HvdtrainError, LauncherMismatchError

_HVDTRAIN = Path(hvdtrain.__file__).resolve().parent


@contextmanager
def installed_horovod() -> Iterator[None]:
    """Return a context in which `import horovod` imports the installed package."""
    path = sys.path[:]
    others = [entry for entry in path if not Path(entry).resolve().is_relative_to(_HVDTRAIN)]
    if others == path:
        yield
        return
    provided = _take_modules()
    sys.path[:] = others
    try:
        yield
    finally:
        sys.path[:] = path
        _take_modules()
        sys.modules.update(provided)


def _take_modules() -> dict[str, ModuleType]:
    """Remove the modules named horovod and below from sys.modules, and return them."""
    names = [name for name in sys.modules if name.partition(".")[0] == "horovod"]
    return {name: sys.modules.pop(name) for name in names}


_BUILD = "python -m hvdtrain build-horovod"
_SETTINGS = {
    # Required for process sets other than the world.
    "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
    # Milliseconds between cycles; with Horovod's default of 1 every operation takes that long.
    "HOROVOD_CYCLE_TIME": "0.2",
    # The cache is keyed by operation names, and here every name is new.
    "HOROVOD_CACHE_CAPACITY": "0",
    # hvdtrain's core detects stalls itself, and knows the user's operation names.
    "HOROVOD_STALL_CHECK_DISABLE": "1",
}
# Horovod's threads synchronize once a cycle, even when idle, and spin in MPI while they wait: they
# must not occupy cores that train.
_MPI_SETTINGS = {"OMPI_MCA_mpi_yield_when_idle": "1"}


@collective
def open_world(config: Config, environ: Mapping[str, str]) -> EngineWorld:
    """Initialize MPI, and Horovod on top of it."""
    with installed_horovod():
        for module in ("torch", "horovod"):
            if importlib.util.find_spec(module) is None:
                remedy = _BUILD if module == "horovod" else f"pip install {module}, then {_BUILD}"
                raise EngineUnavailableError(f"engine horovod needs {module}: {remedy}")
    # First: whichever libmpi is loaded by then is the one that Horovod uses.
    with _set(_MPI_SETTINGS):
        mpi = mpi_engine.open_world(config, environ)
    hvd, version = _load_horovod()
    from hvdtrain.engines.horovod.communicator import HorovodCommunicator, HorovodProcess

    leave = _initialize(hvd)
    ranks = range(hvd.size())
    if (hvd.rank(), hvd.size()) != (mpi.communicator.rank, mpi.communicator.size):
        raise LauncherMismatchError(
            f"Horovod says rank {hvd.rank()} of {hvd.size()}, and {mpi.library} rank "
            f"{mpi.communicator.rank} of {mpi.communicator.size}: start the ranks with mpirun"
        )
    process = HorovodProcess(hvd, mpi.communicator.abort, {tuple(ranks): hvd.global_process_set})
    return EngineWorld(
        engine="horovod",
        library=f"Horovod {version} on {mpi.library}",
        communicator=HorovodCommunicator(process, ranks, "hvdtrain", config.chunk_bytes, leave),
        nodes=mpi.nodes,
        hostnames=mpi.hostnames,
    )


@functools.cache  # modules loaded in installed_horovod() are removed from sys.modules
def _load_horovod() -> tuple[Any, str]:
    """Return horovod.torch, and Horovod's version."""
    try:
        with installed_horovod():
            hvd = importlib.import_module("horovod.torch")
            version: str = importlib.import_module("horovod").__version__
    except (ImportError, OSError) as error:
        raise EngineUnavailableError(
            f"engine horovod cannot load horovod.torch ({error}): {_BUILD} --force"
        ) from error
    if not hvd.mpi_built():
        raise EngineUnavailableError(f"engine horovod needs Horovod with MPI: {_BUILD} --force")
    with open("/proc/self/maps", encoding="utf-8") as maps:
        lines = [line for line in maps if "/libmpi.so" in line or "/libmpi_abi.so" in line]
    names = {line.split(maxsplit=5)[5].strip() for line in lines}
    libraries = {os.path.realpath(name) for name in names}
    if len(libraries) > 1:
        raise EngineUnavailableError(
            f"Horovod was built for another MPI than mpi4py loads ({', '.join(libraries)}): "
            f"{_BUILD} --force"
        )
    return hvd, version


def _initialize(hvd: Any) -> Callable[[], None] | None:
    """Initialize Horovod, unless the script has, and return the function that shuts it down."""
    if hvd.is_initialized():
        return None
    # Horovod would write its own timeline into the file meant for hvdtrain's.
    timeline = os.environ.pop("HOROVOD_TIMELINE", None)
    try:
        with _set(_SETTINGS):
            hvd.init()
    except ValueError as error:
        raise HvdtrainError(f"engine horovod: {error}") from error
    finally:
        if timeline is not None:
            os.environ["HOROVOD_TIMELINE"] = timeline
    leave: Callable[[], None] = hvd.shutdown
    return leave


@contextmanager
def _set(settings: Mapping[str, str]) -> Iterator[None]:
    """Set variables in this context, except those that the user has set."""
    ours = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:  # the next init() must not consider them the user's
            del os.environ[name]
