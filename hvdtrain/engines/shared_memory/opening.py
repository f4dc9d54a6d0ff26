"""Setting up the shared memory of a node's ranks."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

from hvdtrain.collective import collective
from hvdtrain.engines.allgather import Allgather
from hvdtrain.engines.shared_memory.memory import share_memory, warn_once
from hvdtrain.engines.shared_memory.node_group import CHUNK_BYTES, SLOT_BYTES, NodeGroup
from hvdtrain.engines.shared_memory.peers import CHECK_SECONDS, Peers
from hvdtrain.engines.shared_memory.processes import PeerWatch
from hvdtrain.engines.shared_memory.system_errors import (
    SystemFailure,
    agree_on_failure,
    failure_from_error,
)

# How long to spin on a flag before sleeping: longer than it takes to wake up. With fewer cores than
# ranks, spinning would only keep peers from running.
_SPIN_NANOSECONDS = 100_000


@collective
def open_node_group(
    kernel: ctypes.CDLL,
    rank: int,
    allgather: Allgather,
    check_launcher: Callable[[], object] = bool,
    check_seconds: float = CHECK_SECONDS,
) -> NodeGroup | None:
    """Set up shared memory among the ranks of one node."""
    processes = allgather((os.getpid(), os.sched_getaffinity(0)))
    watch, failure = _watch(
        {process: number for number, (process, _) in enumerate(processes) if number != rank}
    )
    memory = None
    try:
        if reason := agree_on_failure(allgather(failure)):
            if rank == 0:
                warn_once(reason)
        else:
            nbytes = SLOT_BYTES + kernel.hvd_staging_bytes(CHUNK_BYTES)
            memory = share_memory(nbytes, rank, len(processes), allgather)
    finally:
        if memory is None and watch is not None:
            watch.close()
    if memory is None or watch is None:
        return None
    cores = set[int]().union(*(cores for _, cores in processes))
    spin = _SPIN_NANOSECONDS if len(processes) <= len(cores) else 0
    peers = Peers(watch, len(processes), check_launcher, check_seconds)
    return NodeGroup(kernel, rank, memory, peers, allgather, spin)


def _watch(peers: dict[int, int]) -> tuple[PeerWatch | None, SystemFailure]:
    try:
        return PeerWatch(peers), SystemFailure()
    except (AttributeError, OSError) as error:
        return None, failure_from_error(error, "pidfd_open")
