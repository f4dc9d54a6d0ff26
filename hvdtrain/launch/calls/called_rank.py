"""One rank of `hvdtrain.run`, which starts it."""

from __future__ import annotations

import os
import pickle
import select
import socket
import struct
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from pathlib import Path

from hvdtrain.errors import EXIT_CRASH
from hvdtrain.launch.cluster_environment import free_port, torch_variables
from hvdtrain.world import promised_world

# Environment variables: where the caller listens, a file's path or HOST:PORT,HOST:PORT..., and the
# secret that both share.
ADDRESS, KEY = "HVDTRAIN_CALL_ADDRESS", "HVDTRAIN_CALL_KEY"
# Set where the rank has the caller's module path, and where it sees no GPU of another rank.
SAME_PATH, OWN_GPUS = "HVDTRAIN_CALL_SAME_PATH", "HVDTRAIN_CALL_OWN_GPUS"

EXIT_NO_CALLER = 69  # as sysexits.h has it: a service is unavailable

# Time for the launcher to end this rank: Open MPI 5's may hang if ranks end before it ends them.
_GRACE_SECONDS = 2.0
# An address of the caller may lead nowhere from here.
_CONNECT_SECONDS = 5.0
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Arrival:
    """What a rank says of itself first, and the addresses that its connection has."""

    rank: int
    node: str
    port: int
    reached: str = ""
    origin: str = ""


@dataclass(frozen=True)
class RankAnswer:
    """What a rank sends back."""

    rank: int
    content: bytes
    failure: str = ""


def main() -> None:
    """Receive the call, run it and send the answer."""
    key = bytes.fromhex(os.environ.pop(KEY))
    world = promised_world(os.environ)
    rank = 0 if world is None else world.rank
    # Open until this process ends; the caller's end closes when the caller ends.
    try:
        caller = connected(os.environ.pop(ADDRESS), key)
    except OSError as error:
        print(f"hvdtrain: {error}", file=sys.stderr, flush=True)
        sys.exit(EXIT_NO_CALLER)
    name = "hvdtrain-caller"
    threading.Thread(target=_end_with, args=[caller], name=name, daemon=True).start()
    caller.send(Arrival(rank, node_name(), free_port()))
    try:
        place, request = caller.recv()
    except (EOFError, OSError):  # the job has ended before it began
        os._exit(EXIT_CRASH)
    os.environ.update(torch_variables(place))
    if os.environ.pop(OWN_GPUS, ""):
        os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    path, call = pickle.loads(request)
    if not os.environ.pop(SAME_PATH, ""):  # its own may lie elsewhere
        path = [*(place for place in path if place not in sys.path), *sys.path]
    sys.path[:] = path
    answer = _called(call, rank)
    caller.send(answer)
    with suppress(EOFError, OSError):
        caller.recv()  # the caller has it: what is sent may be lost with a process
    if answer.failure:
        sys.stdout.flush()
        sys.stderr.flush()
        # A normal exit would wait for the other ranks, which the launcher is about to end.
        os._exit(EXIT_CRASH)


def node_name() -> str:
    """Return a name that processes of one host share, and those of two hosts do not."""
    with suppress(OSError):
        return f"{socket.gethostname()} {_BOOT.read_text().strip()}"
    return socket.gethostname()


def connected(address: str, key: bytes) -> Connection:
    """Return a connection to the caller."""
    if address.startswith("/"):
        return Client(address, "AF_UNIX", authkey=key)
    for place in address.split(","):
        host, _, port = place.rpartition(":")
        with (
            suppress(AuthenticationError, EOFError, OSError),
            socket.create_connection((host, int(port)), _CONNECT_SECONDS) as connection,
        ):
            return _authenticated(connection, key)
    raise ConnectionError(
        f"{socket.gethostname()} cannot reach the process that called the function, at {address}: "
        "let hosts connect to one another, or name a network for hvdtrain.run with interface="
    )


def _authenticated(connection: socket.socket, key: bytes) -> Connection:
    """Return a copy of a connection to the caller, once both have shown that they know the key."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _wait_of(_CONNECT_SECONDS))
    caller = Connection(os.dup(connection.fileno()))
    answer_challenge(caller, key)
    deliver_challenge(caller, key)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _wait_of(0))
    return caller


def _wait_of(seconds: float) -> bytes:
    """Return a duration as the kernel takes it."""
    return struct.pack("ll", int(seconds), 0)


def _end_with(caller: Connection) -> None:
    """End this process when the caller ends, because a launcher that fails as it exits does not."""
    closing = select.poll()
    closing.register(caller.fileno(), select.POLLRDHUP)  # the main thread reads
    closing.poll()
    time.sleep(_GRACE_SECONDS)
    os._exit(EXIT_CRASH)


def _called(call: bytes, rank: int) -> RankAnswer:
    try:
        import cloudpickle

        function, args, kwargs = pickle.loads(call)
        return RankAnswer(rank, cloudpickle.dumps(function(*args, **kwargs)))
    except BaseException as error:  # SystemExit, for example, is no result either
        content = b""
        with suppress(Exception):  # it cannot be pickled; its traceback is sent anyway
            content = cloudpickle.dumps(error)
        return RankAnswer(rank, content, traceback.format_exc())


if __name__ == "__main__":
    # The caller finds the class of the pickled answer by the module's name, not in __main__.
    from hvdtrain.launch.calls import called_rank

    called_rank.main()
