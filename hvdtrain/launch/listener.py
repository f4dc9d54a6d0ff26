"""A socket on which `run --elastic` hears the milestones of its ranks."""

from __future__ import annotations

import secrets
import socket
import time
from contextlib import suppress
from types import TracebackType
from typing import Self

from hvdtrain.launch.addresses import LOOPBACK, own_addresses
from hvdtrain.supervision.milestones import BEGAN, INITIALIZED, LOST

_KEY_BYTES = 16
_LONGEST_BYTES = 200
_BACKLOG = 4096
# A rank reports at once when it has connected.
_SILENT_SECONDS = 10.0


class MilestoneListener:
    """Collects what ranks report; the system keeps it until it is asked for."""

    def __init__(self, remote: bool) -> None:
        self._socket = socket.create_server(("" if remote else LOOPBACK, 0), backlog=_BACKLOG)
        self._socket.setblocking(False)
        port = self._socket.getsockname()[1]
        places = own_addresses() if remote else [LOOPBACK]
        self._places = ",".join(f"{place}:{port}" for place in places)
        self._open: dict[socket.socket, float] = {}  # with the time when each was opened
        self._held: set[socket.socket] = set()  # by ranks that are in init()
        self.renew()

    def renew(self) -> None:
        """Forget all ranks, and hear only those that are given the new `address`."""
        for connection in self._open:
            connection.close()
        self._open, self._held, self.began = {}, set(), 0
        self._key = secrets.token_hex(_KEY_BYTES)
        self.address = f"{self._key}@{self._places}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for connection in (self._socket, *self._open):
            connection.close()

    def heard(self) -> set[str]:
        """Return the milestones of ranks since the last call; LOST if one ended within init().

        A rank that has begun holds its connection until the end of init().
        """
        found, now = set[str](), time.monotonic()
        with suppress(OSError):  # there are no more, or too many files are open
            while True:
                connection, _ = self._socket.accept()
                connection.setblocking(False)
                self._open[connection] = now
        for connection, opened in self._open.copy().items():
            with suppress(BlockingIOError):
                found |= self._read(connection)
            silent = connection in self._open and connection not in self._held
            if silent and now - opened > _SILENT_SECONDS:
                self._close(connection)
        return found

    def _close(self, connection: socket.socket) -> None:
        self._held.discard(connection)
        del self._open[connection]
        connection.close()

    def _read(self, connection: socket.socket) -> set[str]:
        """Return what a rank has reported, and forget a connection that has ended."""
        try:
            text = connection.recv(_LONGEST_BYTES)
        except BlockingIOError:
            raise
        except OSError:
            text = b""
        if not text:
            found = {LOST} if connection in self._held else set()
            self._close(connection)
            return found
        pairs = [line.partition(b" ") for line in text.splitlines()]
        own = self._key.encode()
        found = {name.decode() for key, _, name in pairs if secrets.compare_digest(key, own)}
        if BEGAN in found:
            self.began += 1
            self._held.add(connection)
        if INITIALIZED in found:
            self._held.discard(connection)
        return found
