"""A socket on which `run --elastic` hears the milestones of its ranks."""

from __future__ import annotations

import fcntl
import secrets
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import Self

__all__ = ["MilestoneListener"]

_KEY_BYTES = 16
_LONGEST_BYTES = 200
_BACKLOG = 4096
_SIOCGIFADDR = 0x8915  # of Linux: the IPv4 address of a network interface
_NAME_BYTES, _FIRST_BYTE = 15, 20


class MilestoneListener:
    """Collects what ranks report; the system keeps it until it is asked for.

    Attributes:
        address: value of the variable with which ranks find this socket.
    """

    def __init__(self) -> None:
        self._socket = socket.create_server(("", 0), backlog=_BACKLOG)
        self._socket.setblocking(False)
        self._key = secrets.token_hex(_KEY_BYTES)
        port = self._socket.getsockname()[1]
        places = sorted(_addresses(), key=lambda address: address.startswith("127."))
        self.address = f"{self._key}@" + ",".join(f"{place}:{port}" for place in places)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()

    def heard(self) -> set[str]:
        """Return the milestones that ranks have reported since the last call."""
        found = set[str]()
        while True:
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:
                return found
            with connection, suppress(OSError):
                connection.setblocking(False)
                key, _, milestone = connection.recv(_LONGEST_BYTES).partition(b" ")
                if secrets.compare_digest(key, self._key.encode()):
                    found.add(milestone.decode(errors="replace").strip())


def _addresses() -> Iterator[str]:
    """Yield the IPv4 addresses of this host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none
                asked = struct.pack("256s", name.encode()[:_NAME_BYTES])
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, asked)
                yield socket.inet_ntoa(answer[_FIRST_BYTE : _FIRST_BYTE + 4])
