"""The end of a job with parameter servers: they, and their workers, would wait for ever."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from hvdtrain.errors import EXIT_CRASH
from hvdtrain.launch.supervise import Launches

__all__ = ["ENDED_WITH_THE_CHIEF", "has_waiting_ranks", "listen", "run_as_chief", "run_with_chief"]

# Ranks with these roles end when the chief does; an evaluator has a last checkpoint to read.
ENDED_WITH_THE_CHIEF = ("worker", "ps")

_WORD = b"ended"
_BACKLOG = 4096
_CONNECT_SECONDS = 30.0


def has_waiting_ranks(roles: str | None) -> bool:
    """Return whether a job of these roles ends by its chief alone.

    Args:
        roles: value of --roles.
    """
    named = {part.partition(":")[0].strip() for part in (roles or "").split(",")}
    return {"chief", "ps"} <= named


def listen() -> socket.socket:
    """Return a socket on which ranks can wait for the end of the chief, if this is its rank."""
    return socket.create_server(("", 0), backlog=_BACKLOG)


def run_as_chief(
    words: Sequence[str], environ: Mapping[str, str], listening: socket.socket
) -> tuple[int, int]:
    """Run the chief's script; return its exit code, and how many ranks were told that it is done.

    Args:
        words: command line.
        environ: environment variables of the script.
        listening: socket from listen(), which is closed.
    """
    code, told = Launches().run(words, environ), 0
    listening.setblocking(False)
    # Ranks that have connected wait in the backlog. If the script has failed they are not told: the
    # launcher ends them, with the exit code of this rank.
    with listening, suppress(BlockingIOError):
        while code == 0:
            connection, _ = listening.accept()
            with connection, suppress(OSError):
                connection.sendall(_WORD)
                told += 1
    return code, told


def run_with_chief(words: Sequence[str], environ: Mapping[str, str], address: str) -> int:
    """Run a script until the chief has ended; return the exit code, which is 0 then.

    Args:
        words: command line.
        environ: environment variables of the script.
        address: "host:port" of the chief's socket.
    """
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host, int(port)), _CONNECT_SECONDS)
    except ConnectionRefusedError:  # it has ended already
        return 0
    heard: list[bytes] = []
    with connection:
        code = Launches().run(words, environ, _hears(connection, heard))
    if not heard:
        return code
    return 0 if heard == [_WORD] else EXIT_CRASH


def _hears(connection: socket.socket, heard: list[bytes]) -> Callable[[], bool]:
    def is_over() -> bool:
        if not select.select([connection], [], [], 0)[0]:
            return False
        try:
            heard.append(connection.recv(len(_WORD)))
        except OSError:  # the chief's host, or its process, is gone
            heard.append(b"")
        return True

    return is_over
