"""Start the processes of a contender: one mpirun, or the ranks themselves."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hvdtrain.launch.cluster_environment import (
    ClusterRank,
    free_ports,
    jax_variables,
    tensorflow_config,
    torch_variables,
)
from hvdtrain.launch.launchers.choice import own_launcher
from hvdtrain.launch.launchers.mpi_library import find_mpirun, loaded_library
from hvdtrain.launch.launchers.request import LaunchRequest, without_allocation
from hvdtrain.topology import LOOPBACK
from hvdtrain_bench.compare.strategies import Launch, Strategy
from hvdtrain_bench.harness.jobs import Command, JobEnd, running, wait

# Where they are set, ranks believe them rather than mpirun, and all take themselves for one rank.
_OF_TORCHRUN = ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE")
# The ranks compute on the CPU, whatever there is, and meet on this host alone.
_VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "",
    "GLOO_SOCKET_IFNAME": "lo",
    "JAX_PLATFORMS": "cpu",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}


def run_job(
    strategy: Strategy, ranks: int, task: Path, log: Path, python: str | None, limit: float
) -> JobEnd:
    """Run the processes of a contender on this host until all have ended, or one has failed."""
    worker = [python or sys.executable, "-m", "hvdtrain_bench.compare.worker", str(task)]
    # Nothing of a scheduler's or torchrun's that ranks go by.
    kept = without_allocation(os.environ)
    environ = {name: value for name, value in kept.items() if name not in _OF_TORCHRUN}
    commands = list(_commands(strategy, ranks, worker, environ))
    with log.open("ab") as output, running(commands, output) as started:
        return wait(started, started[:1] if strategy.helpers else started, limit)


def _commands(
    strategy: Strategy, ranks: int, worker: Sequence[str], environ: Mapping[str, str]
) -> Iterator[Command]:
    common = {**environ, **_VARIABLES}
    if strategy.launch is Launch.MPI:
        library = loaded_library(worker[0])
        launcher = own_launcher(library, str(find_mpirun(library)))
        line = launcher.command(LaunchRequest(tuple(worker), ranks=ranks), environ)
        yield Command(line.argv, {**common, **line.variables})
        return
    roles = strategy.roles(ranks)
    size = len(roles)
    addresses = tuple(f"{LOOPBACK}:{port}" for port in free_ports(size, LOOPBACK))
    for rank in range(size):
        place = ClusterRank(rank, size, rank, size, 0, addresses)
        variables = torch_variables(place) | jax_variables(place)
        if strategy.launch is Launch.PROCESSES:
            variables["TF_CONFIG"] = tensorflow_config(place, roles)
        yield Command(worker, {**common, **variables})
