"""Checks and warnings at the start of a job: size of the world, idle tasks, CPU binding."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.collective import collective
from hvdtrain.core.agreement.votes import exchange
from hvdtrain.core.process.exits import write_message
from hvdtrain.engines.communicator import EngineWorld
from hvdtrain.errors import HvdtrainError, LauncherMismatchError, UsageError
from hvdtrain.topology import Topology, count_threads, format_ranks
from hvdtrain.world import SRUN, idle_tasks, promised_world

# How long other ranks wait while the promised rank 0 reports that there is no world.
_REPORT_SECONDS = 5.0


def is_child_process() -> bool:
    """Return whether this process was started by multiprocessing."""
    # A spawned child imports the main script before it knows its parent; until then it is marked.
    inheriting = getattr(multiprocessing.current_process(), "_inheriting", False)
    return inheriting or multiprocessing.parent_process() is not None


def check_world_size(world: EngineWorld) -> None:
    """Check that the world has as many ranks as the launcher has started."""
    promised = promised_world(os.environ)
    size = world.communicator.size
    if promised is None or promised.size == size or world.joined:
        return
    if world.failures is not None and size < promised.size:
        return  # ranks have ended since
    if world.engine == "local":
        raise UsageError(
            f"engine local is for one rank, but {promised.launcher} started {promised.size}: "
            "use engine mpi or auto"
        )
    by_srun = promised.launcher == SRUN
    instead = ", or name its way in: srun --mpi=pmix, or pmi2 for MPICH" if by_srun else ""
    raise LauncherMismatchError(
        f"{promised.launcher} promised {promised.size} ranks "
        f"({promised.variable}={promised.size}), but engine {world.engine} with "
        f"{world.library} formed a world of {size}: they do not belong together. Start the "
        f"ranks with the mpirun of the MPI that is loaded{instead}"
    )


def delay_startup_error(error: HvdtrainError) -> bool:
    """Wait while the promised rank 0 reports an error of all ranks; return at once on rank 0."""
    promised = promised_world(os.environ)
    if promised is None or promised.rank == 0:
        return False
    time.sleep(_REPORT_SECONDS)  # a launcher may end all ranks when the first one exits
    return isinstance(error, LauncherMismatchError | UsageError)  # which all ranks have


def warn_of_idle_tasks(topology: Topology) -> None:
    """Warn if the tasks of a Slurm job other than this rank do nothing."""
    if idle := idle_tasks(os.environ):
        write_message(
            topology.title,
            f"this job of Slurm has {idle + 1} tasks, and this is one rank alone: start all of "
            "them with srun, or with `python -m hvdtrain run`",
        )


@dataclass(frozen=True)
class RankCores:
    """The cores that a rank may use, and its threads."""

    rank: int
    cores: frozenset[int]
    threads: int


def binding_warnings(host: str, ranks: Sequence[RankCores]) -> list[str]:
    """Return what is wrong with the CPU binding of one node, and what to do (pure)."""
    cores = frozenset[int]().union(*(rank.cores for rank in ranks))
    bound = [rank for rank in ranks if len(rank.cores) == 1]
    taken = Counter(rank.cores for rank in bound)
    crowded = [rank for rank in bound if taken[rank.cores] > 1]
    found = []
    if len(cores) < len(ranks):
        found.append(
            f"{_names(ranks)} on {host}: {len(cores)} core{'s' * (len(cores) > 1)} for all of "
            "them: start fewer ranks there, or, if mpirun has bound them, add --bind-to none to it"
        )
    elif crowded:
        found.append(
            f"{_names(crowded)} on {host}: bound to one core that another rank has, too: add "
            "--bind-to none to mpirun, or --map-by core to give each its own"
        )
    if busy := [rank for rank in bound if rank.threads > 1]:
        most = max(rank.threads for rank in busy)
        found.append(
            f"{_names(busy)} on {host}: bound to one core, but computing with {most} threads: add "
            f"--bind-to none to mpirun, or --map-by slot:PE={most}, or set OMP_NUM_THREADS=1"
        )
    return found


@collective
def warn_of_binding(world: EngineWorld, topology: Topology) -> None:
    """Warn, on one rank of each node, of bad CPU binding."""
    cores = frozenset(os.sched_getaffinity(0))
    own = RankCores(topology.rank, cores, count_threads(os.environ, sys.modules))
    gathered = exchange(world.communicator, [own])
    if topology.local_rank == 0:
        node = world.nodes[topology.rank]
        ranks = [rank for (rank,) in gathered if world.nodes[rank.rank] == node]
        for text in binding_warnings(topology.hostnames[topology.rank], ranks):
            write_message(topology.title, text)


def _names(ranks: Sequence[RankCores]) -> str:
    return format_ranks(rank.rank for rank in ranks)
