"""Scripts that wait for a rank to join, whenever it is ready."""

import sys
import time

from hvdtrain.core import context

# Whether this process has joined ranks at work: what it reports would have the number of another.
JOINED = "hvdtrain.engines.mpi.newcomer" in sys.orig_argv


def await_newcomer(wanted: int) -> None:
    """Wait on rank 0 until a rank can join, if there are fewer than `wanted`."""
    here = context.current().topology
    deadline = time.monotonic() + 300
    while here.rank == 0 and here.size < wanted and not context.newcomer_waits():
        assert time.monotonic() < deadline
        time.sleep(0.01)
