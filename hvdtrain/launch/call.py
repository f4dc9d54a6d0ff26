"""`hvdtrain.run`: call a function on every rank of a new job, from Python or from a notebook."""

from __future__ import annotations

import importlib
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any, TypeVar

from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.launch.called_rank import ADDRESS, KEY, STORE, Answer
from hvdtrain.launch.launchers.mpi_library import find_mpirun, loaded_library
from hvdtrain.launch.launchers.request import without_allocation
from hvdtrain.launch.mpirun import mpirun_command
from hvdtrain.launch.session_folder import SESSION, session_folder
from hvdtrain.launch.supervise import bound_to_this_process
from hvdtrain.world import promised_world

__all__ = ["run"]

Result = TypeVar("Result")

_KEY_BYTES = 32
_GRACE_SECONDS = 10.0


def run(
    function: Callable[..., Result],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    np: int = 1,
) -> list[Result]:
    """Call a function on every rank of a new job on this host, and return what each one returned.

    The function calls init() itself, or torch.distributed.init_process_group(), whose variables
    (RANK, WORLD_SIZE, MASTER_ADDR, ...) are set. It may be defined in a notebook or inside another
    function. What ranks print appears here.

    Args:
        function: called on every rank; it, its arguments and its results are pickled.
        args: positional arguments.
        kwargs: keyword arguments.
        np: number of ranks.

    Returns:
        The results, ordered by rank.

    Raises:
        Exception: the exception of the rank that failed first, with a note of its rank and
            traceback.
        UsageError: this process is a rank itself, or cloudpickle or MPI is missing.
        HvdtrainError: ranks ended without a result.
    """
    _require_sense(np)
    request = _dumps((function, tuple(args), dict(kwargs or {})))
    key = secrets.token_bytes(_KEY_BYTES)
    arrived: list[Answer] = []
    ranks: list[Connection] = []
    with session_folder(os.environ) as session:
        # Only this user can reach the socket, and only clients with the key are accepted.
        address = str(Path(session.folder) / "call")
        with _listen(address, np, key) as listener:
            variables = {SESSION: session.folder, ADDRESS: address, KEY: key.hex()}
            variables[STORE] = _free_address()
            process = _start(np, variables, session.lifeline)
            with ThreadPoolExecutor(np) as pool:
                talks = [pool.submit(_talk, listener, request, ranks, arrived) for _ in range(np)]
                try:
                    _show_output(process)
                except BaseException:  # Ctrl-C, for example
                    process.terminate()
                    raise
                finally:
                    try:
                        _end(process)
                    finally:
                        _release(talks, ranks, address)
    return _results(arrived, np, process.returncode)


def _require_sense(np: int) -> None:
    promised = promised_world(os.environ)
    if promised is not None and promised.size > 1:
        raise UsageError(f"run() starts ranks itself: call it without {promised.launcher}")
    if np < 1:
        raise UsageError(f"np={np} must be at least 1")


def _dumps(call: tuple[object, ...]) -> bytes:
    try:
        cloudpickle = importlib.import_module("cloudpickle")
    except ImportError:
        raise UsageError("run() needs cloudpickle: pip install cloudpickle") from None
    # Ranks need this process's module path before they unpickle the call.
    return pickle.dumps((sys.path, cloudpickle.dumps(call)))


def _listen(address: str, np: int, key: bytes) -> Listener:
    try:
        return Listener(address, "AF_UNIX", backlog=2 * np, authkey=key)
    except OSError as error:
        raise UsageError(
            f"run() cannot listen at {address} ({error}): set TMPDIR to a folder with a "
            "shorter path"
        ) from None


def _free_address() -> str:
    """Return an address of this host on which no process listens at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return "{}:{}".format(*probe.getsockname())


def _start(np: int, variables: Mapping[str, str], lifeline: int) -> subprocess.Popen[str]:
    library = loaded_library()
    environ = without_allocation(os.environ)  # other hosts do not have the socket
    line = mpirun_command(
        str(find_mpirun(library)),
        library.vendor,
        [sys.executable, "-m", "hvdtrain.launch.called_rank"],
        ranks=np,
        hostfile=None,
        environ=environ,
        root=os.geteuid() == 0,
    )
    return subprocess.Popen(
        line.argv,
        env={**environ, **line.variables, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        pass_fds=[lifeline],
        preexec_fn=bound_to_this_process(signal.pthread_sigmask(signal.SIG_BLOCK, []), lifeline),
    )


def _talk(
    listener: Listener, request: bytes, ranks: list[Connection], arrived: list[Answer]
) -> None:
    """Send one rank its call, and wait for the answer."""
    try:
        rank = listener.accept()
        ranks.append(rank)  # the rank ends when _release() closes its connection
        rank.send_bytes(request)
        arrived.append(rank.recv())
    except (EOFError, OSError):  # the rank has ended, or _release() has connected
        pass


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


def _release(talks: Sequence[Future[None]], ranks: Sequence[Connection], address: str) -> None:
    """Close the connections of all ranks, and unblock threads that still wait for a rank."""
    for rank in ranks:
        with socket.socket(fileno=os.dup(rank.fileno())) as connection:
            connection.shutdown(socket.SHUT_RDWR)
    for talk in talks:
        if not talk.done():
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(address)


def _results(arrived: Sequence[Answer], np: int, code: int) -> list[Any]:
    for answer in arrived:  # the first one is the cause: other ranks fail because it did
        if answer.failure:
            raise _error(answer, np)
    results = {answer.rank: pickle.loads(answer.content) for answer in arrived}
    missing = [str(rank) for rank in range(np) if rank not in results]
    if missing:
        raise HvdtrainError(
            f"run(): rank {', '.join(missing)} of {np} ended without a result (mpirun's exit code "
            f"is {code}): see what it printed"
        )
    return [results[rank] for rank in range(np)]


def _error(answer: Answer, np: int) -> Exception:
    where = f"on rank {answer.rank} of {np}"
    try:
        error = pickle.loads(answer.content)
    except Exception:  # its class cannot be pickled, or is not here
        error = None
    if not isinstance(error, Exception):  # a rank's SystemExit must not end this process
        return HvdtrainError(f"run(): {where}:\n{answer.failure}")
    error.add_note(f"{where}:\n{answer.failure}")
    return error
