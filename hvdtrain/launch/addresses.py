"""The IPv4 addresses of this host, by which other hosts may reach it."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

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
