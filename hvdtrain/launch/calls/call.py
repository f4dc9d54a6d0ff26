"""`hvdtrain.run`: call a function on every rank of a new job, from Python or from a notebook.

Ranks connect to the caller, are told their place, and answer.
"""

from __future__ import annotations

import importlib
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any, Self, TypeVar

from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.launch.calls.called_rank import (
    ADDRESS,
    KEY,
    SAME_PATH,
    Arrival,
    RankAnswer,
    node_name,
)
from hvdtrain.launch.cluster_environment import ClusterRank, own_addresses
from hvdtrain.launch.hosts.host import total_slots
from hvdtrain.launch.launchers.choice import choose_launcher
from hvdtrain.launch.launchers.mpi_library import loaded_library
from hvdtrain.launch.launchers.options import parse_hosts, require_sense, with_hosts
from hvdtrain.launch.launchers.request import LaunchCommand, LaunchRequest, without_allocation
from hvdtrain.launch.supervise import SESSION, Session, bound_to_this_process, session_folder
from hvdtrain.topology import LOOPBACK, format_ranks
from hvdtrain.world import TORCHRUN_MARKER

__all__ = ["run"]


def dumps_call(
    function: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object] | None,
    caller: str,
) -> bytes:
    """Pickle a call for called_rank, with classes and functions that only this process has."""
    try:
        cloudpickle = importlib.import_module("cloudpickle")
    except ImportError:
        raise UsageError(f"{caller} needs cloudpickle: pip install cloudpickle") from None
    # Ranks need this process's module path before they unpickle the call.
    call = cloudpickle.dumps((function, tuple(args), dict(kwargs or {})))
    return pickle.dumps((sys.path, call))


def _error(answer: RankAnswer, np: int, caller: str) -> Exception:
    where = f"on rank {answer.rank} of {np}"
    try:
        error = pickle.loads(answer.content)
    except Exception:  # its class cannot be pickled, or is not here
        error = None
    if not isinstance(error, Exception):  # a rank's SystemExit must not end this process
        return HvdtrainError(f"{caller}: {where}:\n{answer.failure}")
    error.add_note(f"{where}:\n{answer.failure}")
    return error


_BACKLOG = 4096  # of ranks that connect at the same moment
_KEY_BYTES = 32


class RankServer:
    """Gives every rank its place and its call once all have connected, and collects the answers.

    `variables` are those with which a rank finds it, `caller` is named in errors.
    """

    def __init__(
        self,
        listening: socket.socket,
        address: str,
        call: bytes,
        np: int,
        caller: str,
    ) -> None:
        key = secrets.token_bytes(_KEY_BYTES)
        self.variables = {ADDRESS: address, KEY: key.hex()}
        self.answers: list[RankAnswer] = []
        self.lost = False  # a rank has ended without an answer, or was started twice
        self._listening, self._key, self._call, self._np = listening, key, call, np
        self._caller, self._began = caller, time.monotonic()
        self._here = node_name()
        self._changed = threading.Condition(threading.RLock())
        self._closed = False
        self._arrived: list[Arrival] = []
        self._open: list[Connection] = []
        self._threads = [threading.Thread(target=self._accept, name="hvdtrain-call", daemon=True)]

    @property
    def failed(self) -> bool:
        """Whether a rank has failed or was lost, after which the others are to end."""
        return self.lost or any(answer.failure for answer in self.answers)

    def require_start(self, limit_seconds: float, advice: str) -> None:
        """Check that all ranks have started, unless there is time left."""
        here = len(self._arrived)
        if here < self._np and time.monotonic() - self._began > limit_seconds:
            raise HvdtrainError(
                f"{self._caller}: {here} of {self._np} ranks have started within "
                f"{limit_seconds:.0f} s: {advice}"
            )

    def results(self, cause: str) -> list[Any]:
        """Return the results, ordered by rank, once all ranks have ended."""
        for answer in self.answers:  # the first one is the cause: others fail because it did
            if answer.failure:
                raise _error(answer, self._np, self._caller)
        results = {answer.rank: pickle.loads(answer.content) for answer in self.answers}
        missing = [rank for rank in range(self._np) if rank not in results]
        if missing:
            raise HvdtrainError(
                f"{self._caller}: {format_ranks(missing)} of {self._np} ended without a result "
                f"({cause}): see what it printed"
            )
        return [results[rank] for rank in range(self._np)]

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connections of all ranks, which end these ranks."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()  # from now on no connection is added
        for rank in self._open:
            _shut(rank)
        for thread in self._threads:
            thread.join()
        for rank in self._open:
            rank.close()
        self._listening.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listening.accept()
            except OSError:  # it is closed
                return
            reached, origin = _ends(connection)
            rank = Connection(connection.detach())
            self._open.append(rank)
            # A thread each: others may connect over a network, and say nothing.
            arguments = (rank, reached, origin)
            thread = threading.Thread(
                target=self._serve, args=arguments, name="hvdtrain-call", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def _serve(self, rank: Connection, reached: str, origin: str) -> None:
        try:
            deliver_challenge(rank, self._key)
            answer_challenge(rank, self._key)
            arrival = rank.recv()
        except (AuthenticationError, EOFError, OSError):  # no rank, or one that has ended
            return
        place = self._place(replace(arrival, reached=reached, origin=origin))
        try:
            if place is None:
                _shut(rank)
                return
            rank.send((place, self._call))
            self.answers.append(rank.recv())
            rank.send(None)
        except (EOFError, OSError):
            self._lose()

    def _lose(self) -> None:
        with self._changed:
            self.lost = self.lost or not self._closed
            self._changed.notify_all()

    def _place(self, arrived: Arrival) -> ClusterRank | None:
        """Return the place of a rank once all have arrived; None if it has none."""
        with self._changed:
            if arrived.rank in [other.rank for other in self._arrived]:
                self._lose()
                return None
            self._arrived.append(arrived)
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._closed or self.lost or len(self._arrived) == self._np
            )
            if len(self._arrived) != self._np:
                return None
            order = sorted(self._arrived, key=lambda other: other.rank)
        return places(order, self._here)[order.index(arrived)]


def places(arrived: Sequence[Arrival], here: str) -> list[ClusterRank]:
    """Return the place of each rank, with an address of rank 0's host that all can reach."""
    nodes = [other.node for other in arrived]
    numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    store = f"{_first_host(arrived, here)}:{arrived[0].port}"
    return [
        ClusterRank(
            rank, len(nodes), nodes[:rank].count(node), nodes.count(node), numbers[node], (store,)
        )
        for rank, node in enumerate(nodes)
    ]


def _first_host(arrived: Sequence[Arrival], here: str) -> str:
    """Return an address of rank 0's host by which a connection is known to be possible."""
    first = arrived[0]
    elsewhere = [other for other in arrived if other.node != first.node]
    if not elsewhere:
        return LOOPBACK
    # A rank on the caller's host may have connected at an address that only this host knows.
    return elsewhere[0].reached if first.node == here else first.origin


def _shut(rank: Connection) -> None:
    """Close a connection in both directions, which a thread may be reading from."""
    with socket.socket(fileno=os.dup(rank.fileno())) as connection, suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _ends(connection: socket.socket) -> tuple[str, str]:
    if connection.family != socket.AF_INET:
        return "", ""
    return connection.getsockname()[0], connection.getpeername()[0]


@contextmanager
def served_call(
    function: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object] | None,
    np: int,
    host: str,
    caller: str,
    bind_address: str | None = None,
) -> Iterator[RankServer]:
    """Serve a call until the end of the block, which ends ranks that still run."""
    call, here = dumps_call(function, args, kwargs, caller), bind_address or host
    try:
        address = socket.getaddrinfo(here, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
        listening = socket.create_server((str(address), 0), backlog=_BACKLOG)
    except OSError as error:
        raise HvdtrainError(f"{caller} cannot listen at {here} ({error})") from None
    place = f"{host}:{listening.getsockname()[1]}"
    with RankServer(listening, place, call, np, caller) as server:
        yield server


def run_rank(variables: Mapping[str, str], rank: int, size: int) -> int:
    """Run one rank in a process of its own, which ends with this one; return its exit code."""
    # Modules that were sent to this process must be there, too.
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    # With the marker, variables of a launcher or scheduler that started this process do not count.
    place = {"RANK": str(rank), "WORLD_SIZE": str(size), TORCHRUN_MARKER: "hvdtrain"}
    process = subprocess.Popen(
        [sys.executable, "-m", "hvdtrain.launch.calls.called_rank"],
        env={**without_allocation(os.environ), **path, **place, **variables},
        stdin=subprocess.DEVNULL,
        preexec_fn=bound_to_this_process(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    )
    return process.wait()


Result = TypeVar("Result")

_GRACE_SECONDS = 10.0


def run(
    function: Callable[..., Result],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    np: int | None = None,
    *,
    hosts: str | None = None,
    hostfile: str | os.PathLike[str] | None = None,
    interface: str | None = None,
) -> list[Result]:
    """Call a function on every rank of a new job, and return what each one returned.

    The function calls init() itself, or torch.distributed.init_process_group(), whose variables
    (RANK, WORLD_SIZE, MASTER_ADDR, ...) are set. It may be defined in a notebook or inside another
    function. What ranks print appears here.

    Args:
        function: called on every rank; it, its arguments and its results are pickled.
        args: positional arguments.
        kwargs: keyword arguments.
        np: number of ranks; by default one for each slot of the hosts, or one.
        hosts: hosts with their slots, as in "node1:4,node2:4"; by default this host.
        hostfile: file that lists them, in the format of the installed MPI.
        interface: network interface to use, as in "eth0".

    Returns:
        The results, ordered by rank.

    Raises:
        Exception: the exception of the rank that failed first, with a note of its rank and
            traceback.
        UsageError: this process is a rank itself, the hosts cannot be used, or cloudpickle or MPI
            is missing.
        HvdtrainError: ranks ended without a result.
    """
    asked = LaunchRequest(
        (sys.executable, "-m", "hvdtrain.launch.calls.called_rank"),
        ranks=np,
        hosts=parse_hosts(hosts),
        hostfile=None if hostfile is None else os.fspath(hostfile),
        interface=interface,
    )
    both = "hostfile= and hosts= both name hosts: leave out one of them"
    require_sense(asked, "run()", f"np={np} must be at least 1", both)
    call = dumps_call(function, args, kwargs, "run()")
    # Other hosts of a scheduler's allocation are used when they are named.
    environ = dict(os.environ) if asked.names_hosts else without_allocation(os.environ)
    environ.pop(TORCHRUN_MARKER, None)  # else each rank would be this one
    launcher = choose_launcher(None, loaded_library(), environ)
    request, count = _counted(with_hosts(asked, launcher, environ))
    with session_folder(os.environ) as session:
        listening, address = _listen(session, request)
        with listening:
            server = RankServer(listening, address, call, count, "run()")
            environ |= {SESSION: session.folder, SAME_PATH: "1", **server.variables}
            # Before the server's thread runs, because a fork beside threads may hang.
            process = _start(launcher.command(request, environ), environ, session)
            with server:
                try:
                    assert process.stdout is not None
                    with process.stdout as output:
                        for line in output:
                            sys.stdout.write(line)  # so notebooks show it
                except BaseException:  # Ctrl-C, for example
                    process.terminate()
                    raise
                finally:
                    _end(process)
    return server.results(f"mpirun's exit code is {process.returncode}")


def _counted(request: LaunchRequest) -> tuple[LaunchRequest, int]:
    """Return the request for a known number of ranks, and that number."""
    ranks = request.ranks
    if ranks is None:
        ranks = total_slots(request.hosts) if request.names_hosts else 1
        if any(host.slots is None for host in request.hosts):
            raise UsageError("run(): not all hosts have a number of slots: also pass np=")
    return replace(request, ranks=ranks), ranks


def _listen(session: Session, request: LaunchRequest) -> tuple[socket.socket, str]:
    """Return a socket for ranks, and where they find it; only clients with the key are accepted."""
    if request.names_hosts:
        addresses = own_addresses(request.interface)
        host = addresses[0] if len(addresses) == 1 else ""
        listening = socket.create_server((host, 0), backlog=_BACKLOG)
        port = listening.getsockname()[1]
        return listening, ",".join(f"{address}:{port}" for address in addresses)
    # Only this user can reach it.
    path = str(Path(session.folder) / "call")
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind(path)
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise UsageError(
            f"run() cannot listen at {path} ({error}): set TMPDIR to a folder with a shorter path"
        ) from None
    return listening, path


def _start(
    line: LaunchCommand, environ: Mapping[str, str], session: Session
) -> subprocess.Popen[str]:
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    return subprocess.Popen(
        line.argv,
        env={**environ, **line.variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        pass_fds=[session.lifeline],
        preexec_fn=bound_to_this_process(blocked, session.lifeline),
    )


def _end(process: subprocess.Popen[str]) -> None:
    """Wait for the launcher, which should end soon."""
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
