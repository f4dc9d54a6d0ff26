"""The end of a job with parameter servers: they, and their workers, would wait forever."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from hvdtrain.errors import EXIT_CRASH, UsageError
from hvdtrain.launch.supervise import Launches
from hvdtrain.world import promised_world

# Ranks with these roles end when the chief does; an evaluator has a last checkpoint to read.
ENDED_WITH_THE_CHIEF = ("worker", "ps")

_WORD = b"ended"
_BACKLOG = 4096
_CONNECT_SECONDS = 30.0
# How long a launcher may take to see the exit code of the chief, before another rank has one.
_HEAD_START_SECONDS = 5.0
# Variables in which launchers give the number of ranks on the host.
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def has_waiting_ranks(roles: Sequence[str]) -> bool:
    """Return whether a job of these roles ends by its chief alone."""
    return {"chief", "ps"} <= set(roles)


def listen(environ: Mapping[str, str]) -> socket.socket:
    """Return a socket on which ranks can wait for the end of the chief, if this is its rank.

    It is reached from this host only, if the launcher says that all ranks are on it.
    """
    world = promised_world(environ)
    size = "1" if world is None else str(world.size)
    on_one_host = world is None or size in {environ.get(name) for name in _LOCAL_SIZES}
    return socket.create_server(("127.0.0.1" if on_one_host else "", 0), backlog=_BACKLOG)


def run_as_chief(
    words: Sequence[str], environ: Mapping[str, str], listening: socket.socket
) -> tuple[int, int]:
    """Run the chief's script; return its exit code and the number of ranks told of its end."""
    code, told = Launches().run(words, environ), 0
    if code != 0:
        # Ranks are not told: the launcher ends them, with the exit code of this rank. They must
        # not lose their connections before this process ends with it.
        listening.detach()
        return code, told
    listening.setblocking(False)
    with listening, suppress(BlockingIOError):
        while True:  # ranks that have connected wait in the backlog
            connection, _ = listening.accept()
            with connection, suppress(OSError):
                connection.sendall(_WORD)
                told += 1
    return code, told


def run_with_chief(words: Sequence[str], environ: Mapping[str, str], address: str) -> int:
    """Run a script until the chief has ended; return the exit code, which is 0 then."""
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host, int(port)), _CONNECT_SECONDS)
    except ConnectionRefusedError:  # it has ended already
        return 0
    except OSError as error:
        raise UsageError(
            f"the chief cannot be reached at {address}, where it says when it has ended: {error}"
        ) from None
    # Else the loss of its host would not be noticed.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    heard: list[bytes] = []
    with connection:
        code = Launches().run(words, environ, _hears(connection, heard))
    if not heard:
        return code
    if heard == [_WORD]:
        return 0
    time.sleep(_HEAD_START_SECONDS)
    return EXIT_CRASH


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
