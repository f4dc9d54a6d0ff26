"""Says on standard output where this rank is, as JSON: `python -m hvdtrain.core.roll_call`.

A process of its own, because the rank itself must be left without MPI: what it runs may have an
MPI, or threads and forks, of its own.
"""

from __future__ import annotations

import json
import socket

from hvdtrain.core import context
from hvdtrain.core.objects import allgather_object

__all__ = ["main"]


def main() -> None:
    """Meet the other ranks (collective), and print the fields of launch.other_worlds.Place."""
    context.init()
    topology = context.current().topology
    alone = len(set(topology.hostnames)) == 1
    host = "127.0.0.1" if alone else socket.gethostname()
    address = f"{host}:{_free_port()}"
    facts = {
        "rank": topology.rank,
        "size": topology.size,
        "local_rank": topology.local_rank,
        "local_size": topology.local_size,
        "node": topology.node,
        "addresses": allgather_object(address, "address"),
    }
    context.shutdown()
    print(json.dumps(facts), flush=True)


def _free_port() -> int:
    with socket.socket() as probe:  # which never listens
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
