"""Report of this rank's place in the world, as JSON: `python -m hvdtrain.core.rank_report PORTS`.

PORTS are a free one, and one at which the process that asks listens, if it does. Others are told.

A process of its own, because the rank itself must be left without MPI: the program that it runs
may use an MPI, threads or forks of its own.
"""

from __future__ import annotations

import json
import socket
import sys

from hvdtrain.core import context
from hvdtrain.core.objects import allgather_object

__all__ = ["main"]


def main() -> None:
    """Join the world, and print the fields of cluster_environment.ClusterRank (collective)."""
    context.init()
    topology = context.current().topology
    on_one_host = len(set(topology.hostnames)) == 1
    host = "127.0.0.1" if on_one_host else socket.gethostname()
    every = allgather_object([f"{host}:{port}" for port in sys.argv[1:]], "addresses")
    report = {
        "rank": topology.rank,
        "size": topology.size,
        "local_rank": topology.local_rank,
        "local_size": topology.local_size,
        "node": topology.node,
        "addresses": [addresses[0] for addresses in every],
        "control_addresses": [address for addresses in every for address in addresses[1:]],
    }
    context.shutdown()
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
