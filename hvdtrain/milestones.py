"""What `run --elastic` hears of the ranks that it has started, to tell their end from their loss.

A launcher's exit code does not say it: mpirun of Open MPI 5 returns 0 when a host is lost.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, MutableMapping
from contextlib import suppress

from hvdtrain.world import SUPERVISOR

# A process runs; its init() is complete; that of all ranks is; all ranks have left in order; a rank
# has ended the job because of an error; a rank has ended before all had started; ranks that are
# started again continue from the newest checkpoint; one was written. A path follows these two.
BEGAN, INITIALIZED, STARTED, ENDED, FAILED, LOST, CONTINUES, SAVED = (
    *("began", "initialized", "started", "ended", "failed", "lost", "continues", "saved"),
)

# Environment variable: how often the job has been started again.
RESTARTS = "HVDTRAIN_RESTARTS"

_CONNECT_SECONDS = 2.0
# Environment variable: descriptor of the connection that a rank holds until the end of init().
_HELD = "HVDTRAIN_SUPERVISOR_FD"


def report(milestone: str, environ: Mapping[str, str]) -> None:
    """Report a milestone to the `run --elastic` that has started this rank, if one has."""
    with suppress(OSError):
        _connect(milestone, environ).close()


def begin(environ: MutableMapping[str, str]) -> None:
    """Report BEGAN, and hold the connection until `finish_init`, also in one that replaces this."""
    if SUPERVISOR in environ and _HELD not in environ:
        with suppress(OSError):
            connection = _connect(BEGAN, environ)
            connection.set_inheritable(True)
            environ[_HELD] = str(connection.detach())


def finish_init(environ: MutableMapping[str, str]) -> None:
    """Report that init() is complete on this rank."""
    held = environ.pop(_HELD, None)
    if held is not None:
        with suppress(OSError), socket.socket(fileno=int(held)) as connection:
            key = environ.get(SUPERVISOR, "").partition("@")[0]
            connection.sendall(f"{key} {INITIALIZED}\n".encode())


def _connect(milestone: str, environ: Mapping[str, str]) -> socket.socket:
    """Return a connection on which a milestone was reported."""
    key, _, places = environ.get(SUPERVISOR, "").partition("@")
    for place in filter(None, places.split(",")):
        host, _, port = place.rpartition(":")
        with suppress(OSError):
            connection = socket.create_connection((host, int(port)), _CONNECT_SECONDS)
            connection.sendall(os.fsencode(f"{key} {milestone}\n"))
            return connection
    raise ConnectionError(f"no supervisor at {places or 'any address'}")
