"""Reports what `run` was asked to give a rank, or sleeps until a signal ends it."""

from __future__ import annotations

import os
import signal
import sys
import time

from ranks import report

rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]


def write(stream: int, text: str) -> None:
    """Write a line in one piece, or the launcher may put another rank's output between."""
    os.write(stream, f"rank {rank} {text}\n".encode())


if sys.argv[1:] == ["sleeps"]:
    signal.signal(signal.SIGUSR1, lambda *_: write(1, "has SIGUSR1"))
    write(1, "sleeps")
    time.sleep(3600)
write(1, "says")
write(2, "warns")
report(
    cases=1,
    payload={
        "greeting": os.environ.get("GREETING"),
        "inherited": os.environ.get("INHERITED"),
        "network": os.environ.get("NCCL_SOCKET_IFNAME"),
        "cores": len(os.sched_getaffinity(0)),
        "session": os.environ.get("PMIX_SERVER_TMPDIR"),
    },
)
