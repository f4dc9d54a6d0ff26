"""The end of a job with parameter servers: they, and a chief's workers, would wait forever."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress

from hvdtrain.errors import EXIT_CRASH, UsageError
from hvdtrain.launch.supervise import Launches
from hvdtrain.world import promised_world

CHIEFS = ("chief", "master")
# Ranks with these roles end with those that lead; an evaluator has a last checkpoint to read.
_FOLLOWERS = ("worker", "ps")

_WORD = b"ended"
_BACKLOG = 4096
_CONNECT_SECONDS = 30.0
# How long a launcher may take to see the exit code of a rank that leads, before another has one.
_HEAD_START_SECONDS = 5.0
# Variables in which launchers give the number of ranks on the host.
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def leading_ranks(roles: Sequence[str]) -> list[int]:
    """Return the ranks that end a job with parameter servers: the chief, else all workers."""
    if "ps" not in roles:
        return []
    chiefs = [rank for rank, role in enumerate(roles) if role in CHIEFS]
    return chiefs or [rank for rank, role in enumerate(roles) if role == "worker"]


def follows(rank: int, roles: Sequence[str]) -> bool:
    """Return whether a rank ends when those that lead have."""
    return roles[rank] in _FOLLOWERS and rank not in leading_ranks(roles)


def listen(environ: Mapping[str, str]) -> socket.socket:
    """Return a socket on which ranks can wait for the end of this one, if it leads.

    It is reached from this host only, if the launcher says that all ranks are on it.
    """
    world = promised_world(environ)
    size = "1" if world is None else str(world.size)
    on_one_host = world is None or size in {environ.get(name) for name in _LOCAL_SIZES}
    return socket.create_server(("127.0.0.1" if on_one_host else "", 0), backlog=_BACKLOG)


def run_leading(
    words: Sequence[str], environ: Mapping[str, str], listening: socket.socket
) -> tuple[int, int]:
    """Run the script of a rank that leads; return its exit code and the number of ranks told."""
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


def run_following(
    words: Sequence[str], environ: Mapping[str, str], leaders: Sequence[str]
) -> tuple[int, bool]:
    """Run a script until all leaders have ended; return its exit code, and whether they have."""
    with ExitStack() as stack:
        waiting = [c for address in leaders if (c := _connect(address)) is not None]
        for connection in waiting:
            stack.enter_context(connection)
        lost = False

        def is_over() -> bool:
            nonlocal lost
            for connection in list(waiting):
                try:
                    word = connection.recv(len(_WORD))
                except BlockingIOError:
                    continue
                except OSError:  # its host, or its process, is gone
                    word = b""
                waiting.remove(connection)
                lost = lost or word != _WORD
            return lost or not waiting

        code = 0 if is_over() else Launches().run(words, environ, is_over)
        if lost:
            time.sleep(_HEAD_START_SECONDS)
            return EXIT_CRASH, False
        return (code, False) if waiting else (0, True)


def _connect(address: str) -> socket.socket | None:
    """Return a connection to a rank that leads, None if it has ended."""
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host, int(port)), _CONNECT_SECONDS)
    except ConnectionRefusedError:
        return None
    except OSError as error:
        raise UsageError(
            f"a rank cannot be reached at {address}, where it says when it has ended: {error}"
        ) from None
    # Else the loss of its host would not be noticed.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setblocking(False)
    return connection
