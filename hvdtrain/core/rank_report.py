"""Report of this rank's place in the world, as JSON.

`python -m hvdtrain.core.rank_report PORT,PORT,... [PORT]`: ports that are free, of which one
becomes the rank's, and one at which the process that asks listens, if it does. All ranks are told.

`python -m hvdtrain.core.rank_report --error MESSAGE`: this rank cannot continue. All end, with exit
code 2, and the first one that has a message prints it.

A process of its own, because the rank itself must be left without MPI: the program that it runs
may use an MPI, threads or forks of its own.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hvdtrain.collective import collective
from hvdtrain.control_groups import read_file
from hvdtrain.core import context
from hvdtrain.core.objects import allgather_object
from hvdtrain.errors import EXIT_USAGE, HvdtrainError


@collective
def main() -> None:
    """Join the world, and print the fields of cluster_environment.ClusterRank, and `processes`.

    Those are the numbers of the processes that report for the ranks of this host.
    """
    context.init()
    topology = context.current().topology
    error = sys.argv[2] if sys.argv[1] == "--error" else ""
    errors = allgather_object(error, "errors")
    if any(errors):
        context.shutdown()
        if topology.rank == next(rank for rank, text in enumerate(errors) if text):
            print(f"hvdtrain: {error}", file=sys.stderr, flush=True)
        sys.exit(EXIT_USAGE)
    on_one_host = len(set(topology.hostnames)) == 1
    host = "127.0.0.1" if on_one_host else socket.gethostname()
    offer = [f"{host}:{port}" for port in sys.argv[1].split(",")]
    control = [f"{host}:{port}" for port in sys.argv[2:]]
    # Where process numbers mean the same: hosts may run containers, or have one name.
    machine, numbers = read_file(Path("/proc/sys/kernel/random/boot_id")), ""
    with suppress(OSError):
        numbers = os.readlink("/proc/self/ns/pid")
    place = machine, socket.gethostname(), numbers
    every = allgather_object((offer, control, place, os.getpid()), "addresses")
    report = {
        "rank": topology.rank,
        "size": topology.size,
        "local_rank": topology.local_rank,
        "local_size": topology.local_size,
        "node": topology.node,
        "addresses": distinct_addresses([each[0] for each in every]),
        "control_addresses": [address for each in every for address in each[1]],
        "processes": [each[3] for each in every if each[2] == place],
    }
    context.shutdown()
    print(json.dumps(report), flush=True)


def distinct_addresses(offers: Sequence[Sequence[str]]) -> list[str]:
    """Return one address of each rank, no two alike: ranks of a host may draw the same port."""
    taken: dict[str, int] = {}
    for rank, offer in enumerate(offers):
        found = next((address for address in offer if address not in taken), None)
        if found is None:
            raise HvdtrainError(
                f"rank {rank}: other ranks of its host have drawn its {len(offer)} free ports too: "
                "start the job again"
            )
        taken[found] = rank
    return list(taken)


if __name__ == "__main__":
    main()
