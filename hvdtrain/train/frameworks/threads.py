"""How many threads a rank computes with."""

from __future__ import annotations

import os

from hvdtrain.topology import Topology, cpu_threads

__all__ = ["share_of_threads", "threads_text"]


def share_of_threads(topology: Topology, most: int) -> int | None:
    """Return this rank's share of the cores; None: the user has set OMP_NUM_THREADS (local).

    Args:
        topology: the place of this rank.
        most: threads that the model can use.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return None
    affinity, machine = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    return min(most, cpu_threads(topology, affinity, machine))


def threads_text(threads: int) -> str:
    """Describe the processor: "cpu (2 threads)"."""
    return f"cpu ({threads} thread{'s' * (threads > 1)})"
