"""The IPv4 addresses of this host, by which other hosts may reach it."""

from __future__ import annotations

import fcntl
import random
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

_LOWEST = 15_000
_TRIALS = 100
# Of Linux: the ports that it gives to connections, and to sockets that ask for any port.
_KERNELS_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port(host: str = "") -> int:
    """Return a port of this host on which no process listens: one of free_ports."""
    return free_ports(1, host)[0]


def free_ports(count: int, host: str = "") -> list[int]:
    """Return different ports of this host on which no process listens.

    They are drawn below the range from which the kernel gives out ports, so that no connection
    takes them before the servers are there. Where that range begins too low, they are of the
    kernel's.
    """
    with ExitStack() as stack:
        return [_bound_port(host, stack) for _ in range(count)]


def _bound_port(host: str, stack: ExitStack) -> int:
    """Return a free port, which is bound until the stack is closed."""
    highest = _LOWEST
    with suppress(OSError, ValueError, IndexError):
        highest = int(_KERNELS_RANGE.read_text().split()[0])
    draw = random.SystemRandom()  # seeds of a program must not give all ranks the same port
    ports = [draw.randrange(_LOWEST, highest) for _ in range(_TRIALS)] if highest > _LOWEST else []
    for port in [*ports, 0]:
        probe = stack.enter_context(socket.socket())  # which never listens
        with suppress(OSError):
            probe.bind((host, port))
            found: int = probe.getsockname()[1]
            return found
    raise OSError(f"no port of {host or 'this host'} is free")


LOOPBACK = "127.0.0.1"

_SIOCGIFADDR = 0x8915  # of Linux: the IPv4 address of a network interface
_NAME_BYTES, _FIRST_BYTE = 15, 20


def own_addresses(interface: str | None = None) -> list[str]:
    """Return the addresses of this host's network interfaces, the loopback's last."""
    found = dict(_addresses())
    if interface in found:
        return [found[interface]]
    return sorted(found.values(), key=lambda address: address.startswith("127."))


def _addresses() -> Iterator[tuple[str, str]]:
    """Return the name and address of each network interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none
                asked = struct.pack("256s", name.encode()[:_NAME_BYTES])
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, asked)
                yield name, socket.inet_ntoa(answer[_FIRST_BYTE : _FIRST_BYTE + 4])
