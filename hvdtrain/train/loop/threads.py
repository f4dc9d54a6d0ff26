"""The number of threads that a rank computes with."""

from __future__ import annotations

import os

from hvdtrain.topology import Topology, cpu_threads


def threads_set_by_user() -> bool:
    """Return whether the user has set the number of threads."""
    return "OMP_NUM_THREADS" in os.environ


def thread_share(topology: Topology) -> int | None:
    """Return this rank's share of the cores; None if the user has set OMP_NUM_THREADS."""
    if threads_set_by_user():
        return None
    affinity, machine = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    return cpu_threads(topology, affinity, machine)


def threads_text(threads: int) -> str:
    """Describe the processor: "cpu (2 threads)"."""
    return f"cpu ({threads} thread{'s' * (threads > 1)})"
