"""What `run --elastic` hears of the ranks that it has started, to tell their end from their loss.

A launcher's exit code does not say it: mpirun of Open MPI 5 returns 0 when a host is lost.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress

__all__ = ["BEGAN", "ENDED", "FAILED", "LOST", "RESTARTS", "STARTED", "SUPERVISOR", "report"]

# A process runs; init() is complete; all ranks have left in order; a rank has ended the job because
# of an error; a rank has ended before all had started.
BEGAN, STARTED, ENDED, FAILED, LOST = "began", "started", "ended", "failed", "lost"

# Environment variables: where to report, as KEY@ADDRESS:PORT,ADDRESS:PORT..., and how often the job
# has been started again.
SUPERVISOR, RESTARTS = "HVDTRAIN_SUPERVISOR", "HVDTRAIN_RESTARTS"

_CONNECT_SECONDS = 2.0


def report(milestone: str, environ: Mapping[str, str]) -> None:
    """Report a milestone to the `run --elastic` that has started this rank, if one has (local).

    Args:
        milestone: one of those above.
        environ: environment variables of this rank.
    """
    key, _, places = environ.get(SUPERVISOR, "").partition("@")
    for place in filter(None, places.split(",")):
        host, _, port = place.rpartition(":")
        with (
            suppress(OSError),
            socket.create_connection((host, int(port)), _CONNECT_SECONDS) as connection,
        ):
            connection.sendall(f"{key} {milestone}\n".encode())
            return
