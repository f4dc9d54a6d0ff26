"""Ports for servers that other programs open later."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

__all__ = ["free_port"]

_LOWEST = 15_000
_TRIALS = 100
# Of Linux: the ports that it gives to connections, and to sockets that ask for any port.
_KERNELS_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port(host: str = "") -> int:
    """Return a port of this host on which no process listens (local).

    It is drawn below the range from which the kernel gives out ports, so that no connection takes
    it before the server is there. Where that range begins too low, it is one of the kernel's.

    Args:
        host: address of this host; by default all.
    """
    highest = _LOWEST
    with suppress(OSError, ValueError, IndexError):
        highest = int(_KERNELS_RANGE.read_text().split()[0])
    draw = random.SystemRandom()  # seeds of a program must not give all ranks the same port
    ports = [draw.randrange(_LOWEST, highest) for _ in range(_TRIALS)] if highest > _LOWEST else []
    for port in [*ports, 0]:
        with socket.socket() as probe, suppress(OSError):  # which never listens
            probe.bind((host, port))
            found: int = probe.getsockname()[1]
            return found
    raise OSError(f"no port of {host or 'this host'} is free")
