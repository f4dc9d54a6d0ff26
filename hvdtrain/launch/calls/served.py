"""A function that is called on ranks which another program starts, such as Spark or Ray."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hvdtrain.errors import HvdtrainError
from hvdtrain.launch.calls.called_rank import ADDRESS, KEY
from hvdtrain.launch.calls.rank_server import BACKLOG, RankServer, dumps_call, new_key, results_of
from hvdtrain.launch.launchers.request import without_allocation
from hvdtrain.launch.supervise import bound_to_this_process
from hvdtrain.world import TORCHRUN_MARKER


class ServedCall:
    """A call that ranks fetch from this process."""

    def __init__(
        self, server: RankServer, np: int, variables: Mapping[str, str], caller: str
    ) -> None:
        self.variables = dict(variables)
        self._server, self._np, self._caller = server, np, caller
        self._began = time.monotonic()

    @property
    def lost(self) -> bool:
        """Whether a rank has ended without an answer, or was started twice."""
        return self._server.lost

    @property
    def failed(self) -> bool:
        """Whether a rank has failed or was lost, after which the others are to end."""
        return self.lost or any(answer.failure for answer in self._server.answers)

    def require_start(self, limit_seconds: float, advice: str) -> None:
        """Check that all ranks have started, unless there is time left."""
        here = self._server.arrived
        if here < self._np and time.monotonic() - self._began > limit_seconds:
            raise HvdtrainError(
                f"{self._caller}: {here} of {self._np} ranks have started within "
                f"{limit_seconds:.0f} s: {advice}"
            )

    def results(self, cause: str) -> list[Any]:
        """Return the results, ordered by rank, once all ranks have ended."""
        return results_of(self._server.answers, self._np, self._caller, cause)


@contextmanager
def served_call(
    function: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object] | None,
    np: int,
    host: str,
    caller: str,
    bind_address: str | None = None,
) -> Iterator[ServedCall]:
    """Serve a call until the end of the block, which ends ranks that still run."""
    call, key = dumps_call(function, args, kwargs, caller), new_key()
    here = bind_address or host
    try:
        address = socket.getaddrinfo(here, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
        listening = socket.create_server((str(address), 0), backlog=BACKLOG)
    except OSError as error:
        raise HvdtrainError(f"{caller} cannot listen at {here} ({error})") from None
    variables = {ADDRESS: f"{host}:{listening.getsockname()[1]}", KEY: key.hex()}
    with listening, RankServer(listening, key, call, np) as server:
        yield ServedCall(server, np, variables, caller)


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
