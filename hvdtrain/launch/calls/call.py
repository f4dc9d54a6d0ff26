"""`hvdtrain.run`: call a function on every rank of a new job, from Python or from a notebook."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from hvdtrain.errors import UsageError
from hvdtrain.launch.calls.called_rank import ADDRESS, KEY, SAME_PATH
from hvdtrain.launch.calls.rank_server import BACKLOG, RankServer, dumps_call, new_key, results_of
from hvdtrain.launch.cluster_environment import own_addresses
from hvdtrain.launch.hosts.formats import read_file
from hvdtrain.launch.hosts.host import total_slots
from hvdtrain.launch.launchers.choice import choose_launcher
from hvdtrain.launch.launchers.mpi_library import loaded_library
from hvdtrain.launch.launchers.options import check_interface, parse_hosts, with_hosts
from hvdtrain.launch.launchers.request import LaunchCommand, LaunchRequest, without_allocation
from hvdtrain.launch.supervise import SESSION, Session, bound_to_this_process, session_folder
from hvdtrain.world import TORCHRUN_MARKER, refuse_on_ranks

__all__ = ["run"]

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
    _require_sense(asked)
    call = dumps_call(function, args, kwargs, "run()")
    # Other hosts of a scheduler's allocation are used when they are named.
    environ = dict(os.environ) if asked.names_hosts else without_allocation(os.environ)
    environ.pop(TORCHRUN_MARKER, None)  # else each rank would be this one
    launcher = choose_launcher(None, loaded_library(), environ)
    request, count = _counted(with_hosts(asked, launcher, environ))
    key = new_key()
    with session_folder(os.environ) as session:
        listening, address = _listen(session, request)
        variables = {SESSION: session.folder, ADDRESS: address, KEY: key.hex(), SAME_PATH: "1"}
        environ |= variables
        with listening:
            process = _start(launcher.command(request, environ), environ, session)
            with RankServer(listening, key, call, count) as server:
                try:
                    _show_output(process)
                except BaseException:  # Ctrl-C, for example
                    process.terminate()
                    raise
                finally:
                    _end(process)
    cause = f"mpirun's exit code is {process.returncode}"
    return results_of(server.answers, count, "run()", cause)


def _require_sense(request: LaunchRequest) -> None:
    refuse_on_ranks("run()")
    if request.ranks is not None and request.ranks < 1:
        raise UsageError(f"np={request.ranks} must be at least 1")
    if request.hostfile is not None and request.hosts:
        raise UsageError("hostfile= and hosts= both name hosts: leave out one of them")
    if request.hostfile is not None:
        read_file(request.hostfile)
    check_interface(request.interface)


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
        listening = socket.create_server((host, 0), backlog=BACKLOG)
        port = listening.getsockname()[1]
        return listening, ",".join(f"{address}:{port}" for address in addresses)
    # Only this user can reach it.
    path = str(Path(session.folder) / "call")
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind(path)
        listening.listen(BACKLOG)
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


def _show_output(process: subprocess.Popen[str]) -> None:
    """Print the ranks' output until all have ended, by sys.stdout so that notebooks show it."""
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            sys.stdout.write(line)


def _end(process: subprocess.Popen[str]) -> None:
    """Wait for the launcher, which should end soon."""
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
